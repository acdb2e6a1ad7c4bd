"""`resize`: pixels to one size, by Pillow, and where they were before."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np

from models.pipelines.declared.contract import Array, ArrayWork, Contract
from router.base.errors import ConfigError, InvalidRequest
from router.base.extras import install
from router.values.tensors import TensorSpec

Side = Annotated[int, msgspec.Meta(ge=1, le=16_384)]


class Resize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options.

    Attributes:
        width, height: of the result, in pixels.
        mode: `fit` keeps the proportions and leaves the rest black, right and below; `stretch` fills; `crop` keeps the
            proportions and cuts the longer side at both ends.

    Writes beside `resized` the tensor `placed`: (x scale, y scale, x offset, y offset), with which a point of the image
    is found in the result: scale · point + offset.
    """

    width: Side
    height: Side
    mode: Literal["fit", "stretch", "crop"] = "fit"

    shared = True

    @property
    def contract(self) -> Contract:
        resized = TensorSpec("resized", "UINT8", (self.height, self.width, 3))
        return Contract((TensorSpec("pixels", "UINT8", (-1, -1, 3)),), (resized, TensorSpec("placed", "FP32", (4,))))

    def open(self) -> ArrayWork:
        """Import Pillow.

        Raises:
            ConfigError: it is not installed.
        """
        try:
            from PIL import Image  # noqa: F401, PLC0415 - only who resizes images needs it
        except ModuleNotFoundError:
            raise ConfigError(f"resize needs Pillow: run: {install('vision')}", param="pipelines") from None
        return self._resize

    def _resize(self, batch: dict[str, Array]) -> dict[str, Array]:
        found = [self._one(pixels) for pixels in batch["pixels"]]
        return {
            "resized": np.stack([pixels for pixels, _ in found]),
            "placed": np.array([placed for _, placed in found], np.float32),
        }

    def _one(self, pixels: Array) -> tuple[Array, tuple[float, float, float, float]]:
        from PIL import Image  # noqa: PLC0415

        height, width = pixels.shape[:2]
        if not width or not height:
            raise InvalidRequest("`pixels`: an image without pixels", param="pixels")
        wide, high = self.width / width, self.height / height
        if self.mode == "fit":
            wide = high = min(wide, high)
        elif self.mode == "crop":
            wide = high = max(wide, high)
        size = max(1, round(width * wide)), max(1, round(height * high))
        scaled = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))
        left, top = max(0, (size[0] - self.width) // 2), max(0, (size[1] - self.height) // 2)
        cut = scaled[top : top + self.height, left : left + self.width]
        whole = np.zeros((self.height, self.width, 3), np.uint8)
        whole[: cut.shape[0], : cut.shape[1]] = cut
        return whole, (size[0] / width, size[1] / height, -float(left), -float(top))
