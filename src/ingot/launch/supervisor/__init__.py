"""Supervision of a job: its records, what is decided after a failure, and runs on one machine."""
