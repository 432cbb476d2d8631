"""What the results of several benchmarks must say alike."""

import numpy as np
import pytest


def check_times(found, settings):
    assert len(found["seconds"]) == len(found["other_cores"]) == settings["repeats"]
    assert found["median_seconds"] == pytest.approx(np.median(found["seconds"]))


def check_speed_up(speed_up, slow, fast):
    ratio = np.median(slow) / np.median(fast)
    assert speed_up["ratio_of_medians"] == pytest.approx(ratio)
