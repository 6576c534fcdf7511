"""Save, verify, find and load; export and import of foreign weights."""
