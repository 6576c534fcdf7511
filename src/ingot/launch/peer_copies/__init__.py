"""Copies of a node's training state that another node of the job keeps in its memory."""
