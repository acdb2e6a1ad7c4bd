"""A sentence encoder on ONNX Runtime: a batch of token ids to the mean of their vectors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edge_agent.batching.manifest import EncoderManifest
from edge_agent.generate.turn import Turn
from edge_agent.runtime.onnx.session import OpenedSession, open_session, shrinking
from hardware_profiles.loader import RuntimeOptions
from models.pipelines.embedding import Array, EncoderShape, encoding, padded
from models.pipelines.stage import Work
from router.base.errors import ArtifactError

_KEPT_TOKENS = 1024  # memory of batches up to so many is kept for the next one: pages new to the process cost a tenth


@dataclass(frozen=True, slots=True)
class OnnxEncoder:
    """One session, used by all instances: they share its weights, and each computes a batch of its own.

    Attributes:
        turn: what computes beside it takes turns with it; None computes at any time.
        large: ONNX Runtime's options for large batches, whose memory is given back.
    """

    opened: OpenedSession
    turn: Turn | None
    large: Any

    def encode(self, batch: list[list[int]]) -> Array:
        """Return float32 (B, H) for B lists of ids."""
        ids, mask = padded(batch)
        options = self.large if ids.size > _KEPT_TOKENS else None
        with self.turn or contextlib.nullcontext():
            pooled: Array = self.opened.session.run(None, {"input_ids": ids, "mask": mask}, options)[0]
        return pooled

    def work(self) -> Work:
        """Return the stage's function."""
        return partial(encoding, self.encode)


def load_encoder(folder: Path, manifest: EncoderManifest, options: RuntimeOptions, turn: Turn | None) -> OnnxEncoder:
    """Load an encoder.

    Raises:
        ArtifactError: ONNX Runtime refuses it, or it is not what its manifest says.
    """
    opened = open_session(folder / "model.onnx", manifest.variant, options, arena=True)
    session: Any = opened.session
    names = {item.name for item in session.get_inputs()}, [item.name for item in session.get_outputs()]
    if names != ({"input_ids", "mask"}, ["pooled"]):
        raise ArtifactError(
            f"{folder / 'model.onnx'} does not fit its manifest; "
            f"run: overspill models pull {manifest.family} --prepare --force"
        )
    encoder = OnnxEncoder(opened, turn, shrinking())
    encoder.encode([[0]])  # the first run allocates: nobody shall wait for that, and no pace be learnt from it
    return encoder


def shape_of(folder: Path, manifest: EncoderManifest) -> EncoderShape:
    """Return what the stages around an encoder need to know of it."""
    return EncoderShape(folder / "tokenizer.json", manifest.context_tokens, manifest.vocab_size, manifest.dimensions)
