"""Compression of updates: encoded by the client, decoded by the server."""

from __future__ import annotations


class CompressionError(ValueError):
    """A received update cannot be decoded."""
