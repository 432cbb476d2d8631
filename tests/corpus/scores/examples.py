"""Examples of mappers that read columns of an earlier step, and no text."""

from gpuclassify import (
    ApplyThresholds,
    ScoreBuckets,
    Select,
    Thresholds,
    score_edges,
)
from tests.examples import FRAME


def thresholds(**options):
    labelled = FRAME.assign(good=FRAME["id"] % 3 > 0)
    found = Thresholds.fit(
        labelled,
        score="weight",
        label="good",
        recall=0.5 if "max_chars" in options else 0.8,
        min_labels=1,
        calibration="sigmoid",
    )
    return ApplyThresholds(found, keep_field="keep", probability_field="p")


def buckets(**options):
    return ScoreBuckets(score_edges(FRAME, "weight", n=5 if "max_chars" in options else 4))


def select(**options):
    """Drops no row."""
    return Select("weight >= -1" if "max_chars" in options else "weight >= 0")


EXAMPLES = {
    "thresholds": thresholds,
    "buckets": buckets,
    "select": select,
}
