"""The run as a process: lease, heartbeat, stop requests, run folder."""
