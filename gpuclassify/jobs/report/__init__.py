"""Reports of a job: counts, progress, the report page; read `report.py` first."""
