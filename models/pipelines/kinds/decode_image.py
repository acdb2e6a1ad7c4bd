"""`decode-image`: JPEG, PNG, WebP … to pixels, by Pillow. What an orientation tag says is done."""

from __future__ import annotations

import io
from typing import Annotated, Any

import msgspec
import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Contract
from router.base.errors import ConfigError, InvalidRequest, in_words
from router.base.extras import install
from router.values.tensors import TensorSpec

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM")
"""No others: of PostScript, for one, Pillow has an interpreter make a picture."""


class DecodeImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options.

    Attributes:
        max_pixels: larger images are refused before they are decoded: a few kilobytes can hold gigabytes of pixels.
    """

    max_pixels: Annotated[int, msgspec.Meta(ge=1)] = 50_000_000

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
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
                if width * height > self.max_pixels:
                    raise InvalidRequest(  # noqa: TRY301
                        f"`image`: {width} × {height} pixels, decoded are {self.max_pixels} at most: shrink it",
                        param="image",
                    )
                upright: Any = ImageOps.exif_transpose(image)
                return np.asarray(upright.convert("RGB"))
        except InvalidRequest:
            raise
        except UnidentifiedImageError:
            raise InvalidRequest(
                f"`image`: {len(data)} bytes that are no image of a known format: send JPEG, PNG or WebP", param="image"
            ) from None
        except Exception as error:  # Pillow raises whatever a decoder does, SyntaxError too
            raise InvalidRequest(f"`image`: it cannot be decoded: {in_words(error)}", param="image") from error
