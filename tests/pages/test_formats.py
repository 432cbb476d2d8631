"""Numbers and times as pages, tables and the terminal show them."""

import pytest

from gpuclassify.pages import bin_edge, readable_time, short_number


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.12, "0.1 s"), (9.94, "9.9 s"), (9.96, "0:10"), (59.6, "1:00"), (3723, "1:02:03")],
)
def test_short_times_have_a_fraction(seconds, shown):
    assert readable_time(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"), (0.1234, "0.123"), (999.4, "999"), (999.7, "1k"), (1_234, "1.23k"),
        (999_400, "999k"), (999_950, "1M"), (3.4e9, "3.4G"), (9.9996e11, "1T"), (1e15, "1,000T"),
        (-1_234, "-1.23k"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_and_a_unit(number, shown):
    assert short_number(number) == shown


@pytest.mark.parametrize(
    ("edge", "shown"),
    [(0.5, "0.5"), (999.4, "999"), (999.7, "1,000"), (1_234, "1,234"), (12_345, "12.3k")],
)
def test_edges_of_bins_are_whole_from_a_thousand(edge, shown):
    assert bin_edge(edge) == shown
