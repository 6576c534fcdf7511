"""The device mesh, and how a model is spread over it."""
