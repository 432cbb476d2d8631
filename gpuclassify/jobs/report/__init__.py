"""What a job tells: counts, progress, the report page."""
