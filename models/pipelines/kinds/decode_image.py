"""`decode-image`: JPEG, PNG, WebP … to pixels, by Pillow.

What an orientation tag says is done. Of an animation the first picture counts; of 16 bits the upper 8; what is
transparent shows the colour that it has.
"""

from __future__ import annotations

import io
import re
from typing import Annotated, Any

import msgspec
import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Contract
from router.base.errors import ConfigError, InvalidRequest, in_words
from router.base.extras import install
from router.values.tensors import TensorSpec

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM")
"""No others: of PostScript, for one, Pillow has an interpreter make a picture."""

_TILE_WIDTH, _TILE_LENGTH = 322, 323  # tags of TIFF
_MAX_SCANS = 100  # of a progressive JPEG, which has about 10; libtiff takes as many
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]")  # that a length follows: 01 and d0 to d7 stand alone
_MAX_READS = 100_000  # headers are read in Python, and a megabyte of them may take a second for everybody
_START_OF_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"


class DecodeImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options.

    Attributes:
        max_pixels: larger images are refused by their header: a few kilobytes can hold gigabytes of pixels.
    """

    max_pixels: Annotated[int, msgspec.Meta(ge=1, le=10**10)] = 50_000_000

    shared = True

    @property
    def contract(self) -> Contract:
        return Contract((TensorSpec("image", "BYTES", (1,)),), (TensorSpec("pixels", "UINT8", (-1, -1, 3)),))

    def open(self) -> ArrayWork:
        """Import Pillow.

        Raises:
            ConfigError: it is not installed.
        """
        try:
            from PIL import Image  # noqa: F401, PLC0415 - only who decodes images needs it
        except ModuleNotFoundError:
            raise ConfigError(f"decode-image needs Pillow: run: {install('vision')}", param="pipelines") from None
        return self._decode

    def _decode(self, batch: dict[str, Array]) -> dict[str, list[Array]]:
        return {"pixels": [self._one(row[0]) for row in batch["image"]]}

    def _one(self, data: bytes) -> Array:
        from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415

        try:
            with Image.open(_Pieces(data), formats=_FORMATS) as image:
                self._check(image, data)
                ImageOps.exif_transpose(image, in_place=True)
                return _rgb(image)
        except InvalidRequest:
            raise
        except Image.DecompressionBombError:
            raise _fault(f"more pixels than are decoded, {self.max_pixels} at most: shrink it") from None
        except UnidentifiedImageError:
            raise _fault(f"{len(data)} bytes that are no image of a known format: send JPEG, PNG or WebP") from None
        except Exception as error:  # Pillow raises whatever a decoder does, SyntaxError too
            raise _fault(f"it cannot be decoded: {in_words(error)}") from error

    def _check(self, image: Any, data: bytes) -> None:
        """Raises InvalidRequest for what its header says is too much to decode."""
        width, height = image.size
        if image.format == "TIFF":  # a tile is unpacked whole, however little of it lies in the image
            width, height = max(width, image.tag_v2.get(_TILE_WIDTH, 0)), max(height, image.tag_v2.get(_TILE_LENGTH, 0))
        if width * height > self.max_pixels:
            raise _fault(f"{width} × {height} pixels, decoded are {self.max_pixels} at most: shrink it")
        if image.format in {"JPEG", "MPO"} and _scans(data) > _MAX_SCANS:
            raise _fault(f"a JPEG of more than {_MAX_SCANS} scans, each of which is computed whole: save it anew")


class _Pieces(io.BytesIO):
    """A file that is read in no more pieces than one of its size may need."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise _fault(f"a header of more than {_MAX_READS} pieces: save it anew, without what is no picture")
        return super().read(size)


def _fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"`image`: {what}", param="image")


def _scans(data: bytes) -> int:
    """Count the scans of a JPEG, and no further than matters: each takes 30 bytes and as long as the whole image."""
    scans, at = 0, 2
    while scans <= _MAX_SCANS and (marker := _MARKER.search(data, at)) and marker[0] != _END_OF_IMAGE:
        scans += marker[0] == _START_OF_SCAN
        at = marker.end() + max(2, int.from_bytes(data[marker.end() : marker.end() + 2], "big"))
    return scans


def _rgb(image: Any) -> Array:
    """Return pixels, uint8 (H, W, 3), of whatever depth and colours."""
    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in {"PNG", "PPM"})
    if sixteen_bits:  # Pillow would make white of all but the darkest
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in {"I", "F"}:
        raise _fault(
            f"a TIFF of {'floats' if image.mode == 'F' else '32 bits'} a pixel, whose white nobody knows: "
            "convert it to 8 or 16 bits"
        )
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
