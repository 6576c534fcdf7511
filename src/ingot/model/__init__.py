"""One GPT and its parts."""
