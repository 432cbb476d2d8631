"""What is done with scores once they are there: buckets of equal weight, and the best share."""

COMBINE = ("max", "min")  # which of its scores' buckets is a row's
