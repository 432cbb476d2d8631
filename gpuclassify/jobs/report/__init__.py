"""What a job reports: counts, progress, the report page."""
