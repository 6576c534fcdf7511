"""Checks of nodes and network before training starts."""
