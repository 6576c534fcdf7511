"""What `ingot quickstart` decides: how text is prepared, and which model fits the text, the time and the machine."""
