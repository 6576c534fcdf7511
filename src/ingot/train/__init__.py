"""The loop and what surrounds a step."""
