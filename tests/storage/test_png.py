"""PNG images, as Pillow reads them."""

from __future__ import annotations

import base64
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from partita.storage.png import data_uri, encode_png


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_pillow_reads_the_same_pixels(channels: int, mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    image = Image.open(BytesIO(encode_png(pixels.tobytes(), 7, 5, channels)))
    assert (image.mode, image.size) == (mode, (7, 5))
    assert np.array_equal(np.asarray(image).reshape(5, 7, channels), pixels)


def test_address_holds_the_image() -> None:
    image = encode_png(b"\x80", 1, 1, 1)
    start, _, rest = data_uri(image).partition(",")
    assert start == "data:image/png;base64"
    assert base64.b64decode(rest) == image


def test_wrong_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="an image of 2 by 2 pixels has 12 bytes, not 11"):
        encode_png(bytes(11), 2, 2, 3)
