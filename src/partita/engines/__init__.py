"""Engines: they run jobs on clients and return the updates."""
