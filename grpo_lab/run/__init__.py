"""What a run holds, records, saves and evaluates."""
