"""`onnx`: a model of the store, or a file. What computes it is the tier's own affair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from models.pipelines.declared.contract import ArrayWork, Contract


class OnnxOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options; one of both.

    Attributes:
        variant: an artifact of the store, by its name in the catalogue; its manifest tells inputs and outputs.
        path: a model.onnx; the stage's `inputs` and `outputs` tell the rest.
    """

    variant: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    path: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if (self.variant is None) == (self.path is None):
            raise ValueError(f"give either `variant` or `path`, not {'both' if self.path else 'neither'}")


OpenModel = Callable[[Path, Contract], ArrayWork]
"""Loads a file that has such inputs and outputs; raises ArtifactError where it has others."""


@dataclass(frozen=True, slots=True)
class Onnx:
    """A model as a stage; its threads share one session, which computes their batches side by side."""

    file: Path
    contract: Contract
    load: OpenModel
    shared: bool = True

    def open(self) -> ArrayWork:
        """Load it.

        Raises:
            ArtifactError: it cannot be loaded, or has other inputs and outputs.
        """
        return self.load(self.file, self.contract)
