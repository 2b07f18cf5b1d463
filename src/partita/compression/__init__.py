"""What makes an update smaller on the wire, and whole again at the server."""

from __future__ import annotations


class CompressionError(ValueError):
    """Something that came over the wire and cannot be opened."""
