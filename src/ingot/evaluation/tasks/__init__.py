"""Downstream tasks: records to prompts, prompts to scores, scores to metrics."""
