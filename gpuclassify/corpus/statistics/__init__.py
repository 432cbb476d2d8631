"""Statistics of scores and labels: intervals, quantiles, agreement."""
