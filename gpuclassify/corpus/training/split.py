"""Split rows into train, validation and test parts by strata, without dividing groups."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

import numpy as np

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
PARTS = tuple(SHARES)
FOLDS = 10  # folds of a cross-validation with the same shares
LEAST_ROWS = 100  # rows that suffice for a part of any share
_ROUNDING = 1e-6  # tolerance of sums of shares


def split(strata: np.ndarray, groups: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Split rows into train, validation and test part (80%, 10%, 10%), without dividing groups.

    Returns the sorted row indices of each part, by its name. `groups`, int64 (rows,), are equal for
    rows of a group. `strata`, int64 (rows,) from 0, should have similar shares in all parts. Raises
    ValueError if there are fewer than three groups.

    scikit-learn's StratifiedGroupKFold takes a millisecond or two per group, longer than embedding
    a text.
    """
    groups, counts = _counted(strata, groups)
    if len(counts) < len(PARTS):
        raise ValueError(
            f"the rows are of {len(counts)} group(s), and train, validation and test parts need "
            "one each: annotate more, or leave group= out"
        )
    chance = np.random.default_rng(seed).permutation(len(counts))
    dealt = _Deal(counts)
    dealt.deal(np.lexsort((chance, -dealt.sizes, counts.argmax(axis=1))))
    dealt.fill(np.lexsort((chance, -dealt.sizes)))
    part_of_row = dealt.part_of[groups]
    return {name: np.flatnonzero(part_of_row == part) for part, name in enumerate(PARTS)}


def folds(strata: np.ndarray, groups: np.ndarray, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Split rows ten times for cross-validation, so that each row is in one test part.

    Returns, for each split, sorted row indices by name of the part: "train", "validation" and
    "test". `strata` and `groups` are int64 (rows,). There are fewer splits if there are fewer
    groups.
    """
    groups, counts = _counted(strata, groups)
    chance = np.random.default_rng(seed).permutation(len(counts))
    order = np.lexsort((chance, -counts.sum(axis=1), counts.argmax(axis=1)))
    count = min(FOLDS, len(counts))
    fold_of_group = np.empty(len(counts), dtype=np.int64)
    fold_of_group[order] = np.arange(len(counts)) % count
    fold = fold_of_group[groups]
    splits = []
    for test in range(count):
        number = (fold - test) % count  # 0 for the test part, 1 for the validation part
        rows = (np.flatnonzero(is_in) for is_in in (number > 1, number == 1, number == 0))
        splits.append(dict(zip(PARTS, rows, strict=True)))
    return splits


def _counted(strata: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's group, renumbered from 0, and counts of rows, int64 (groups, strata)."""
    groups = np.unique(groups, return_inverse=True)[1]
    counts = np.zeros((groups.max(initial=-1) + 1, strata.max(initial=0) + 1), dtype=np.int64)
    np.add.at(counts, (groups, strata), 1)
    return groups, counts


class _Deal:
    """Assignment of groups of rows to parts: 0 is train, 1 validation, and 2 test.

    ``part_of`` has the part of each group, at first 0. `counts` are from `_counted`.
    """

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts
        self.sizes = counts.sum(axis=1)
        self.part_of = np.zeros(len(counts), dtype=np.int64)
        self.shares = list(SHARES.values())
        # Rows that each part lacks of its share.
        self.lacking = [share * int(self.sizes.sum()) for share in self.shares]
        self.lacking[0] -= int(self.sizes.sum())
        self.trained = counts.sum(axis=0)  # rows of the train part by stratum

    def deal(self, order: np.ndarray) -> None:
        """Assign each group to the part that is the most rows below its share of those assigned.

        `order` lists the indices of all groups in the order of assignment. Validation and test take
        no group that is larger than the rest of their final share; the train part takes groups of
        any size. The first group in `order` with rows of a stratum goes to the train part.
        """
        so_far = [0.0] * len(PARTS)
        trains = set(order[(self.counts[order] > 0).argmax(axis=0)].tolist())  # one per stratum
        for group, size in zip(order.tolist(), self.sizes[order].tolist(), strict=True):
            so_far = [lack + share * size for lack, share in zip(so_far, self.shares, strict=True)]
            part = 0
            for other in range(1, len(PARTS)) if group not in trains else ():
                if so_far[other] > so_far[part] and size <= self.lacking[other] + _ROUNDING:
                    part = other
            so_far[part] -= size
            if part:
                self._move(group, part)

    def fill(self, largest_first: np.ndarray) -> None:
        """Move groups between the train part and the others, to bring sizes nearer to the shares.

        `largest_first` are the indices of all groups by number of rows. A part that is empty gets a
        group in any case.
        """
        held_out = range(1, len(PARTS))
        for part in held_out:
            for group in self._groups_of(0, largest_first):
                if self.lacking[part] < self.sizes[largest_first[-1]]:
                    break
                if self.sizes[group] <= self.lacking[part] + _ROUNDING and self._can_spare(group):
                    self._move(group, part)
        for part in held_out:
            if not (self.part_of == part).any():
                smallest_first = self._groups_of(0, largest_first)[::-1]
                self._move(next(filter(self._can_spare, smallest_first), smallest_first[0]), part)
        while any(self._move_nearer(part, largest_first) for part in held_out):
            pass

    def _move_nearer(self, part: int, order: np.ndarray) -> bool:
        """Move one group to or from a part if that brings its number of rows nearer to its share.

        `part` is 1 or 2, and the other part is 0, train. Returns whether a group was moved.
        """
        lacking, parts = self.lacking[part], self.part_of[order]
        moves = np.where(parts == part, -1, 1) * self.sizes[order]
        can_move = (parts == 0) | (parts == part) if (parts == part).sum() > 1 else parts == 0
        left = np.where(can_move, abs(lacking - moves), np.inf)
        nearer = np.flatnonzero(left < abs(lacking) - _ROUNDING)
        for rank in nearer[np.argsort(left[nearer], kind="stable")].tolist():
            if parts[rank] == part or self._can_spare(order[rank]):
                self._move(order[rank], part if parts[rank] == 0 else 0)
                return True
        return False

    def _groups_of(self, part: int, order: np.ndarray) -> list[int]:
        return order[self.part_of[order] == part].tolist()

    def _can_spare(self, group: int) -> bool:
        """Return whether all strata of this group also occur in other groups of the train part."""
        counts = self.counts[group]
        return bool((self.trained > counts)[counts > 0].all())

    def _move(self, group: int, part: int) -> None:
        size, before = int(self.sizes[group]), self.part_of[group]
        self.lacking[before] += size
        self.lacking[part] -= size
        self.trained += self.counts[group] * (int(part == 0) - int(before == 0))
        self.part_of[group] = part


def join_groups(groups: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, int]:
    """Join groups that share a text, unless the joined group is too large for the train part.

    `groups` and `texts` are each row's group and text, int64 (rows,), numbered from 0. Texts in few
    groups are used first, because a text in very many, such as an error page, would join
    everything. Returns the joined group of each row, and the number of texts that are still in
    several groups.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    nodes = groups.max(initial=-1) + 1
    # Text and group of each distinct pair.
    pair_texts, pair_groups = np.divmod(np.unique(texts * nodes + groups), nodes)
    group_counts = np.bincount(pair_texts)  # number of groups per text
    shared = np.flatnonzero(group_counts > 1)
    rank = np.full(len(group_counts), len(shared))
    rank[shared[np.argsort(group_counts[shared], kind="stable")]] = np.arange(len(shared))

    def joined(count: int) -> np.ndarray:
        """Return each row's group if the `count` shared texts in the fewest groups join these."""
        is_first = rank[pair_texts] < count
        ends = pair_groups[is_first], nodes + pair_texts[is_first]
        edges = coo_array(
            (np.ones(len(ends[0]), bool), ends), shape=(nodes + len(group_counts),) * 2
        )
        return connected_components(edges, directed=False)[1][groups]

    room = max(SHARES["train"] * len(groups), np.bincount(groups).max(initial=0))

    def is_too_large(count: int) -> bool:
        return bool(np.bincount(joined(count)).max() > room)

    most = len(shared)
    if is_too_large(most):
        most = bisect.bisect_left(range(1, most + 1), True, key=is_too_large)
    whole = joined(most)
    distinct = np.unique(texts * nodes + whole)
    return whole, int((np.bincount(distinct // nodes) > 1).sum())


def refuse_small(parts: Mapping[str, np.ndarray], groups: np.ndarray) -> None:
    """Raise ValueError if large groups leave the validation or test part too few rows.

    Too few are fewer than half of its share, and fewer than 100. `parts` has row indices by name of
    the part, and `groups` the group of every row.
    """
    rows = len(groups)
    for name in PARTS[1:]:
        count = len(parts[name])
        if count < min(SHARES[name] * rows / 2, LEAST_ROWS):
            sizes = np.unique(groups, return_counts=True)[1]
            raise ValueError(
                f"the {name} part has {count} of {rows:,} rows ({count / rows:.1%}), too few to "
                "judge by: groups stay whole, those that share a text count as one, and the "
                f"largest of {len(sizes):,} has {sizes.max():,} rows. Name a finer group=, "
                "annotate more groups, take fewer rows of the largest, or leave group= out"
            )
