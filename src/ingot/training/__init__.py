"""The training loop and what surrounds a step."""
