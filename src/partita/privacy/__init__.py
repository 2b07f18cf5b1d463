"""Differential privacy: what a run releases, what it costs, and what an attacker can learn from it."""
