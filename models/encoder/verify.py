"""An encoder's artifact beside float32 on the test set's text: how far its vectors turn, who is nearest to whom."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import onnxruntime
import tokenizers

from models.catalogue.families import Variant
from models.encoder.artifact import make_encoder
from models.measure.corpus import FOLDER
from models.measure.runner import session_options
from models.pipelines.embedding import padded
from models.store.store import ModelStore
from router.base.errors import InvalidRequest

_TEXTS = 400
_SHORTEST_CHARS = 20


class EncoderReport(msgspec.Struct, frozen=True):
    """What was found.

    Attributes:
        mean_cosine, least_cosine: with float32, over the texts.
        same_nearest_pct: texts of which the nearest other text is the same, in percent.
        failures: what of the catalogue's budget is not kept.
    """

    variant: str
    texts: int
    mean_cosine: float
    least_cosine: float
    same_nearest_pct: float
    failures: tuple[str, ...] = ()


def verify_encoder(variant: Variant, store: ModelStore) -> EncoderReport:
    """Measure an ONNX variant of an encoder.

    Raises:
        InvalidRequest: it is no such variant.
        ArtifactError: an artifact is missing or damaged.
    """
    if variant.format != "onnx":
        raise InvalidRequest(
            f"`{variant.name}` is of format `{variant.format}`: verify an onnx variant", param="variant"
        )
    family = store.catalogue.family(variant.family)
    exact = next(v for v in family.variants if v.format == "onnx" and v.precision == "fp32")
    texts = _texts()
    expected = _vectors(make_encoder(exact, store), texts)
    found = _vectors(store.artifact_dir(variant), texts)
    cosine = (expected * found).sum(axis=1)
    same = _nearest(expected) == _nearest(found)
    mean = float(cosine.mean())
    budget = variant.min_cosine
    failures = () if budget is None or mean >= budget else (f"mean cosine {mean:.5f} is below {budget:g}",)
    return EncoderReport(variant.name, len(texts), mean, float(cosine.min()), 100 * float(same.mean()), failures)


def _texts() -> list[str]:
    whole = (FOLDER / "test.txt").read_text(encoding="utf-8")
    sentences = [text.strip() for text in re.split(r"(?<=[.!?])\s+", whole)]
    return [text for text in sentences if len(text) >= _SHORTEST_CHARS][:_TEXTS]


def _vectors(folder: Path, texts: list[str]) -> npt.NDArray[np.float32]:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_padding()
    backend.enable_truncation(256)
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), session_options(0), providers=["CPUExecutionProvider"]
    )
    rows = []
    for text in texts:
        ids, mask = padded([backend.encode(text).ids])
        rows.append(session.run(None, {"input_ids": ids, "mask": mask})[0][0])
    found = np.stack(rows)
    unit: npt.NDArray[np.float32] = found / np.linalg.norm(found, axis=1, keepdims=True)
    return unit


def _nearest(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -1)
    nearest: npt.NDArray[np.int64] = similar.argmax(axis=1)
    return nearest
