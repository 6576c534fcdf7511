"""Small tasks that come with ingot, written by tools/make_tasks.py."""
