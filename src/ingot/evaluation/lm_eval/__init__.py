"""lm-evaluation-harness with our models: `ingot eval --harness`, and the harness's own command line."""
