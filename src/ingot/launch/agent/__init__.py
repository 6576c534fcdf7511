"""What runs on each node of a job."""
