"""Validation loss."""
