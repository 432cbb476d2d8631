"""Numbers and times as pages, tables and the terminal show them."""

import pytest

from gpuclassify.pages import readable_time


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.12, "0.1 s"), (9.94, "9.9 s"), (9.96, "0:10"), (59.6, "1:00"), (3723, "1:02:03")],
)
def test_short_times_have_a_fraction(seconds, shown):
    assert readable_time(seconds) == shown
