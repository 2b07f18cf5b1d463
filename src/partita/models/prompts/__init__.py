"""Frozen dual encoders, and the prompts and adapters that methods train on them."""
