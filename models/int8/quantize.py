"""INT8 artifacts: symmetric Q/DQ around every matrix, accurate enough to replace float32.

The catalogue names the seed of the rotation (`rotation_seed`); `seeds` chooses one by perplexity on the selection set.
The graph is refused if it breaks a rule (models.graph.gate); then it speaks, and if it loops, or loses a fact that
float32 knows, another seed is tried (models.measure.quality). The manifest records the seed and those refused. The same
source and seed give the same weights and scales on every processor (but for a last bit in 100,000), so that what was
measured of a rotation where the catalogue was written holds wherever it is made (models.int8.calibrate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from models.graph.artifact import Made, Note, Recipe, Rotation, encoder_of, finish, present, record_of, silent
from models.graph.decoder import Decoder, greedy
from models.graph.fused import fuse
from models.graph.gate import check_graph
from models.graph.graph import artifact_bytes, write_graph
from models.int8.rounding import DOWN_BLOCK, prepare
from models.measure.corpus import chats, chunks, digest
from models.measure.quality import FACTS, HeldOut, faults, score
from models.measure.runner import OnnxRunner
from router.base.errors import ArtifactError, InvalidRequest
from router.base.host import usable_cores

if TYPE_CHECKING:
    from models.catalogue.families import Variant
    from models.store.store import ModelStore

_RECIPE = "int8-qdq-9"
_SEEDS = (1, 2, 3, 4)  # tried in this order after the catalogue's, where the gate on generations refuses it
_SPOKEN_TOKENS = 24


@dataclass(frozen=True)
class Trial:
    """One rotation on the selection set.

    Attributes:
        refused: why the graph may not serve, empty if it may.
    """

    seed: int
    perplexity: float
    refused: str


class Quantizer:
    """One INT8 variant's model and data, ready to be rounded under any rotation."""

    def __init__(self, variant: Variant, store: ModelStore, note: Note = silent) -> None:
        """Read the weights and the data sets.

        Raises:
            ModelNotFound, ArtifactError: the source was not pulled, or the model has no chat template.
        """
        self._variant, self._told = variant, note
        self._source_sha256 = store.source_sha256(variant.family)
        self.encoder = encoder_of(store, variant.family)
        self._sequences = [chat.prompt_ids + chat.answer_ids for chat in chats("calibration", self.encoder)]
        self._note("reading the weights")
        self.model = fuse(store.weights(variant.name))

    def _note(self, line: str) -> None:
        self._told(f"{self._variant.name}: {line}")

    def write(self, folder: Path, seed: int, refused: Sequence[int] = ()) -> None:
        """Fill a folder with the whole artifact of one rotation.

        Raises:
            ArtifactError: the graph breaks a rule of `models.graph.gate`.
        """
        ready = prepare(self.model, self._sequences, self._note, seed=seed)
        facts = check_graph(write_graph(ready.model, folder, ready.plan))
        recipe = _recipe(self._variant, self._source_sha256, seed)
        made = Made(recipe, ready.prefix, Rotation(seed, tuple(refused)))
        finish(folder, self._variant, self.model.config, self.encoder, made)
        self._note(f"graph accepted, {facts.int8_matrices} of {facts.matrices} matrices in INT8")

    def lost_in_speech(self, folder: Path) -> list[str]:
        """Say what an artifact gets wrong when it speaks and float32 does not, over the selection set's known facts."""
        runner = OnnxRunner(folder, usable_cores())
        eos_ids = self.encoder.tokenizer.eos_ids
        asked = [chat for chat in chats("selection", self.encoder) if chat.question in FACTS]
        said = [runner.generate([chat.prompt_ids], _SPOKEN_TOKENS, eos_ids)[0] for chat in asked]
        return faults(asked, said, self._expected, self.encoder.tokenizer)

    @cached_property
    def _expected(self) -> list[list[int]]:
        """What float32 answers to the same questions."""
        decoder, eos_ids = Decoder(self.model), self.encoder.tokenizer.eos_ids
        asked = [chat for chat in chats("selection", self.encoder) if chat.question in FACTS]
        return [greedy(decoder, chat.prompt_ids, _SPOKEN_TOKENS, eos_ids) for chat in asked]

    def trial(self, folder: Path, seed: int) -> Trial:
        """Fill a folder with one rotation and measure it on the selection set."""
        self.write(folder, seed)
        text = HeldOut(chunks("selection", self.encoder), (), spoken=0)
        seen = score(OnnxRunner(folder, usable_cores()), text, self.encoder.tokenizer.eos_ids)
        found = Trial(seed, seen.perplexity, "; ".join(self.lost_in_speech(folder)))
        verdict = f", refused: {found.refused}" if found.refused else ""
        self._note(f"rotation {seed}: perplexity {found.perplexity:.3f} on the selection set{verdict}")
        return found


def quantize(
    variant_name: str, store: ModelStore, *, seeds: Sequence[int] = (), force: bool = False, note: Note = silent
) -> Path:
    """Make the artifact of an INT8 variant, unless the same is there; return its folder.

    Args:
        seeds: rotations to choose from by perplexity on the selection set; empty takes the catalogue's.

    Raises:
        ModelNotFound, InvalidRequest: the variant is unknown or not INT8.
        ArtifactError: the source was not pulled, the graph breaks a rule of `models.graph.gate`, no rotation keeps
            what float32 says, or the disk is full: nothing is placed then.
    """
    variant = store.catalogue.variant(variant_name)
    if variant.precision != "int8" or variant.format != "onnx":
        raise InvalidRequest(
            f"`{variant.name}` is {variant.precision} {variant.format}; quantize makes int8 onnx variants",
            param="variant",
        )
    there = None if force or seeds else _there(store, variant)
    if there is not None:
        note(f"{variant.name}: already quantized")
        return there
    quantizer = Quantizer(variant, store, note)
    with store.placing(variant, artifact_bytes(quantizer.model, 1)) as folder:
        if seeds:
            _write_best(quantizer, folder, seeds)
        else:
            _write_first(quantizer, folder, variant, note)
    return store.artifact_dir(variant)


def _recipe(variant: Variant, source_sha256: str, seed: int) -> Recipe:
    data = (digest("calibration"), digest("selection"))
    return Recipe(source_sha256, variant.layers, (_RECIPE, f"rotation-seed-{seed}", f"down-block-{DOWN_BLOCK}", *data))


def _there(store: ModelStore, variant: Variant) -> Path | None:
    """Return the artifact that is there, if this recipe made it with the catalogue's seed, or after trying that."""
    record = record_of(store, variant)
    rotation = None if record is None else record.rotation
    if rotation is None or variant.rotation_seed not in (None, rotation.seed, *rotation.refused):
        return None
    return present(store, variant, _recipe(variant, store.source_sha256(variant.family), rotation.seed))


def _write_first(quantizer: Quantizer, folder: Path, variant: Variant, note: Note) -> None:
    """Write the catalogue's rotation, or the first other one that keeps what float32 says."""
    own = () if variant.rotation_seed is None else (variant.rotation_seed,)
    refused: list[int] = []
    lost: list[str] = []
    for seed in dict.fromkeys((*own, *_SEEDS)):
        quantizer.write(folder, seed, refused)
        lost = quantizer.lost_in_speech(folder)
        if not lost:
            return
        note(f"{variant.name}: rotation {seed} refused: {lost[0]}")
        refused.append(seed)
    listed = "".join(f"\n  {line}" for line in lost)
    raise ArtifactError(f"{variant.name}: INT8 loses what float32 says, whatever the rotation:{listed}")


def _write_best(quantizer: Quantizer, folder: Path, seeds: Sequence[int]) -> None:
    """Write the rotation of the lowest perplexity on the selection set, of those that keep what float32 says."""
    trials = [quantizer.trial(folder, seed) for seed in seeds]
    kept = [trial for trial in trials if not trial.refused]
    if not kept:
        listed = "".join(f"\n  rotation {trial.seed}: {trial.refused}" for trial in trials)
        raise ArtifactError(f"INT8 loses what float32 says, whatever the rotation:{listed}")
    best = min(kept, key=lambda trial: trial.perplexity)
    quantizer.write(folder, best.seed, [trial.seed for trial in trials if trial.refused])
