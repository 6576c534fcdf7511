"""Supervision of ranks: node agent, attempts, restart policy, hang diagnosis."""
