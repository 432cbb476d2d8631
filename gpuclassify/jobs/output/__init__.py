"""What a job writes: encoding, exactly-once parts, manifest, the Hub."""
