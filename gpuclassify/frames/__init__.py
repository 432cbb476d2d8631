"""frames."""
