"""Jobs from files to files, with each part written exactly once; read `job.py` first."""
