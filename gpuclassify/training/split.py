"""Train, validation and test parts: groups stay whole, and strata are dealt evenly."""

from __future__ import annotations

import numpy as np

PARTS = ("train", "validation", "test")
FOLDS = 10  # of which one is the validation part, one the test part, and the others train


def split(strata: np.ndarray, groups: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Which rows are in each part.

    Groups, in the order of their strata and then of their sizes, large ones first, are dealt in
    turn to `FOLDS` folds, as scikit-learn's StratifiedKFold deals rows; equal ones in random order.
    (Its StratifiedGroupKFold takes a millisecond or two a group, which is longer than a GPU takes
    to embed a text.)

    Parameters
    ----------
    strata : numpy.ndarray
        int64 (rows,), from 0: what parts are to have equal shares of. A group's is its commonest.
    groups : numpy.ndarray
        int64 (rows,), equal for rows of one group.
    seed : int

    Returns
    -------
    dict of str to numpy.ndarray
        For each of `PARTS` int64 positions of its rows, ascending.

    Raises
    ------
    ValueError
        There are fewer than three groups.
    """
    groups = np.unique(groups, return_inverse=True)[1]
    counts = np.zeros((groups.max(initial=-1) + 1, strata.max(initial=0) + 1), dtype=np.int64)
    np.add.at(counts, (groups, strata), 1)
    if len(counts) < len(PARTS):
        raise ValueError(
            f"the rows are of {len(counts)} group(s), and train, validation and test parts need "
            "one each: annotate more, or leave group= out"
        )
    chance = np.random.default_rng(seed).permutation(len(counts))
    order = np.lexsort((chance, -counts.sum(axis=1), counts.argmax(axis=1)))
    folds = np.empty(len(counts), dtype=np.int64)
    folds[order] = np.arange(len(counts)) % min(FOLDS, len(counts))
    of_row = folds.max() - folds[groups]  # the largest groups train
    return {
        "train": np.flatnonzero(of_row > 1),
        "validation": np.flatnonzero(of_row == 1),
        "test": np.flatnonzero(of_row == 0),
    }
