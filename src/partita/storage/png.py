"""Small PNG images for HTML pages, without an image library."""

from __future__ import annotations

import base64
import struct
import zlib

COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # channels -> PNG's number: gray, RGB, RGB with opacity
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode_png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """Encode an image as PNG.

    Args:
        pixels: Rows from top to bottom, with `channels` bytes per pixel.
        width: Width in pixels.
        height: Height in pixels.
        channels: 1 for gray, 3 for RGB, 4 for RGB with opacity.

    Raises:
        ValueError: If there are too few or too many bytes.
    """
    line = width * channels
    if len(pixels) != line * height:
        raise ValueError(f"an image of {width} by {height} pixels has {line * height} bytes, not {len(pixels)}")
    rows = b"".join(b"\0" + pixels[start : start + line] for start in range(0, len(pixels), line))  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(kind, data) for kind, data in parts)


def data_uri(image: bytes) -> str:
    """Return a PNG image as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
