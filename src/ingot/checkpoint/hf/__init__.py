"""Hugging Face folders: read and write."""
