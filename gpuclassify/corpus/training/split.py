"""Train, validation and test parts: groups stay whole, and strata are dealt evenly."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

import numpy as np

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
PARTS = tuple(SHARES)
FOLDS = 10  # folds of a cross-validation with the same shares
LEAST_ROWS = 100  # rows that suffice for a part, however small their share
_ROUNDING = 1e-6  # tolerance of sums of shares


def split(strata: np.ndarray, groups: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Split the rows into parts; return which rows are in each.

    Groups, in the order of their strata and then of their sizes, large ones first and equal ones in
    random order, are dealt to the part that lacks most of its share of the rows so far, unless they
    are larger than what it lacks of its share of all. What parts lack then, other groups of the
    train part fill as nearly as they can. Of each stratum a group trains, if there is one to spare.
    (scikit-learn's StratifiedGroupKFold takes a millisecond or two a group, which is longer than a
    GPU takes to embed a text.)

    Strata, int64 (rows,) from 0, are what parts are to have equal shares of; a group's is its
    commonest. For each of `PARTS` the result has int64 positions of its rows, ascending.
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
    return {name: np.flatnonzero(part_of_row == place) for place, name in enumerate(PARTS)}


def folds(strata: np.ndarray, groups: np.ndarray, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Split the rows as `split` does, in several ways, so that each row is in one test part.

    Groups, in the order of `split`, are dealt to `FOLDS` in turn; each is a test part once, and a
    validation part once.
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
        place = (fold - test) % count  # 0 of the test part, and 1 of the validation part
        rows = (np.flatnonzero(is_in) for is_in in (place > 1, place == 1, place == 0))
        splits.append(dict(zip(PARTS, rows, strict=True)))
    return splits


def _counted(strata: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return groups numbered from 0, and rows of each of their strata (groups, strata)."""
    groups = np.unique(groups, return_inverse=True)[1]
    counts = np.zeros((groups.max(initial=-1) + 1, strata.max(initial=0) + 1), dtype=np.int64)
    np.add.at(counts, (groups, strata), 1)
    return groups, counts


class _Deal:
    """Assignment of groups to parts. `counts` has each group's rows by stratum (groups, strata)."""

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts
        self.sizes = counts.sum(axis=1)
        self.part_of = np.zeros(len(counts), dtype=np.int64)  # all train at first
        self.shares = list(SHARES.values())
        self.lacking = [share * int(self.sizes.sum()) for share in self.shares]  # rows of a part
        self.lacking[0] -= int(self.sizes.sum())
        self.trained = counts.sum(axis=0)  # rows of each stratum

    def deal(self, order: np.ndarray) -> None:
        """Give each group to the part that lacks most of its share of the groups so far."""
        so_far = [0.0] * len(PARTS)
        trains = set(order[(self.counts[order] > 0).argmax(axis=0)].tolist())  # one a stratum
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
        """Bring the held-out parts nearer to their shares, and leave none empty."""
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
        while any(self._is_nearer(part, largest_first) for part in held_out):
            pass

    def _is_nearer(self, part: int, order: np.ndarray) -> bool:
        """Tell whether a group was moved that brings a held-out part nearer to its share."""
        lacking, parts = self.lacking[part], self.part_of[order]
        moves = np.where(parts == part, -1, 1) * self.sizes[order]
        can_move = (parts == 0) | (parts == part) if (parts == part).sum() > 1 else parts == 0
        left = np.where(can_move, abs(lacking - moves), np.inf)
        nearer = np.flatnonzero(left < abs(lacking) - _ROUNDING)
        for place in nearer[np.argsort(left[nearer], kind="stable")].tolist():
            if parts[place] == part or self._can_spare(order[place]):
                self._move(order[place], part if parts[place] == 0 else 0)
                return True
        return False

    def _groups_of(self, part: int, order: np.ndarray) -> list[int]:
        return order[self.part_of[order] == part].tolist()

    def _can_spare(self, group: int) -> bool:
        """Tell whether the train part keeps rows of each of the group's strata."""
        counts = self.counts[group]
        return bool((self.trained > counts)[counts > 0].all())

    def _move(self, group: int, part: int) -> None:
        size, before = int(self.sizes[group]), self.part_of[group]
        self.lacking[before] += size
        self.lacking[part] -= size
        self.trained += self.counts[group] * (int(part == 0) - int(before == 0))
        self.part_of[group] = part


def join_groups(groups: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, int]:
    """Join groups that share a text, as far as the train part has room for the joined group.

    Texts of few groups are looked at first: one of a great many, such as an error page, would make
    one group of everything.

    Both are int64 (rows,), from 0; equal for rows of one group, and for rows of one text. Returns
    the groups, and how many texts stand in several of them.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    nodes = groups.max(initial=-1) + 1
    of_text, of_group = np.divmod(np.unique(texts * nodes + groups), nodes)  # distinct pairs
    is_in = np.bincount(of_text)  # how many groups each text is in
    shared = np.flatnonzero(is_in > 1)
    rank = np.full(len(is_in), len(shared))
    rank[shared[np.argsort(is_in[shared], kind="stable")]] = np.arange(len(shared))

    def joined(count: int) -> np.ndarray:
        """Return the components of groups that share one of the first `count` texts."""
        is_first = rank[of_text] < count
        ends = of_group[is_first], nodes + of_text[is_first]
        edges = coo_array((np.ones(len(ends[0]), bool), ends), shape=(nodes + len(is_in),) * 2)
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
    """Raise ValueError if a part is too small to judge by, because groups are too large."""
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
