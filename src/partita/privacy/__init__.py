"""Differential privacy: what a run releases, what that costs, and what an attacker gets out of it."""
