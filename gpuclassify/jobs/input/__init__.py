"""What a job reads: files, parts, schema."""
