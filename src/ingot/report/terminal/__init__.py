"""Runs in the terminal: a table of runs, two side by side, a live view of one."""
