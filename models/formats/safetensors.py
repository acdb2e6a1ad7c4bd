"""Safetensors files as float32 arrays, by the `safetensors` library, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from router.base.errors import ArtifactError

if TYPE_CHECKING:
    import numpy.typing as npt

_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsFile:
    """One open `.safetensors` file; tensors are read through a memory map when asked for."""

    def __init__(self, path: Path) -> None:
        """Map `path` and read its header.

        Raises:
            ArtifactError: the file is missing, truncated, or its header is damaged.
        """
        # Offline machines that only run ONNX go without these; `ml_dtypes` gives numpy its bfloat16.
        import ml_dtypes  # noqa: F401, PLC0415
        import safetensors  # noqa: PLC0415

        self.path = path
        try:
            self._file = cast("Any", safetensors.safe_open(path, framework="numpy"))
        except (OSError, safetensors.SafetensorError) as error:
            raise ArtifactError(f"cannot read {path}: {error}; pull the model again") from error
        self.names: tuple[str, ...] = tuple(self._file.keys())

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor as a new float32 array.

        Raises:
            ArtifactError: there is no such tensor, or it is not F64, F32, F16 or BF16.
        """
        if name not in self.names:
            raise ArtifactError(f"{self.path}: has no tensor `{name}`")
        kind = self._file.get_slice(name).get_dtype()
        if kind not in _FLOATS:
            raise ArtifactError(f"{self.path}: `{name}` is {kind}; weights must be F32, F16 or BF16 (not quantized)")
        value: npt.NDArray[np.float32] = self._file.get_tensor(name).astype(np.float32)
        return value
