"""What came out: console, metrics file, trackers, pictures."""
