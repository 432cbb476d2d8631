"""What a job reports: counts, progress, the report page; read `report.py` first."""
