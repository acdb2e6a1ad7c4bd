"""A plain ONNX Runtime loop over the graph of `models.graph.graph`, for generating, scoring and timing.

Serving has its own runtime; this one is short, greedy and exact, so that a measurement has nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from models.store.manifest import MANIFEST_FILE
from router.base.errors import ArtifactError
from router.base.json_input import UNREADABLE

if TYPE_CHECKING:
    import onnxruntime

Array = npt.NDArray[np.float32]
_MASKED = -1e9
_SPIN_US = 20  # as hardware profiles have it by default
Feeds = dict[str, npt.NDArray[Any]]


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Like the edge runtime's: no memory kept for shapes gone by; threads wait for the next operator; exact sums."""
    import onnxruntime  # noqa: PLC0415 - heavy, and only this room needs it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads != 1 else "0")
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.add_session_config_entry("session.x64quantprecision", "1")
    return options


class OnnxRunner:
    """One artifact directory in an ONNX Runtime session.

    Attributes:
        prefix_ids: tokens whose fp32 keys and values the artifact ships; sequences that begin so start from them, and
            others take those of the layers where any first token has the same.
    """

    def __init__(self, directory: Path, threads: int = 2) -> None:
        import onnxruntime  # noqa: PLC0415

        manifest_path = directory / MANIFEST_FILE
        try:
            manifest = msgspec.json.decode(manifest_path.read_bytes())
        except (OSError, *UNREADABLE) as error:
            raise ArtifactError(
                f"cannot read {manifest_path}: {error}; export or quantize the variant again"
            ) from error
        self.num_layers: int = manifest["num_layers"]
        self.num_kv_heads: int = manifest["num_kv_heads"]
        self.head_dim: int = manifest["head_dim"]
        self.vocab_size: int = manifest["vocab_size"]
        self.prefix_ids: list[int] = manifest["prefix_token_ids"]
        self.session = onnxruntime.InferenceSession(
            str(directory / "model.onnx"), session_options(threads), providers=["CPUExecutionProvider"]
        )
        self._outputs = [output.name for output in self.session.get_outputs()]
        self._settled_layer: int | None = manifest.get("settled_layer")
        empty = np.zeros((self.num_layers, self.num_kv_heads, 0, self.head_dim), np.float32)
        self._prefix = (empty, empty)
        if self.prefix_ids:
            with np.load(directory / "prefix.npz") as arrays:
                self._prefix = (arrays["k"], arrays["v"])

    def feeds(self, ids: npt.NDArray[np.int64], past: tuple[Array, Array], lengths: npt.NDArray[np.int64]) -> Feeds:
        """Inputs for (B, S) new tokens after `past` (k and v, each (layers, B, G, P, D)).

        Args:
            lengths: (B,), how many of the P past positions of each row are filled.
        """
        batch, new = ids.shape
        room = past[0].shape[3]
        at = np.arange(new)
        bias = np.full((batch, 1, new, room + new), _MASKED, np.float32)
        bias[:, 0, :, :room] = np.where(np.arange(room) < lengths[:, None], 0.0, _MASKED)[:, None]
        bias[:, :, :, room:] = np.where(at[None, :] <= at[:, None], 0.0, _MASKED)
        feeds: Feeds = {
            "input_ids": ids,
            "position_ids": lengths[:, None] + at,
            "attention_bias": bias,
            "logits_at": np.tile(at, (batch, 1)),
        }
        for index in range(self.num_layers):
            feeds[f"past_k.{index}"], feeds[f"past_v.{index}"] = past[0][index], past[1][index]
        return feeds

    def run(self, feeds: Feeds) -> tuple[Array, Array, Array]:
        """Return logits (B, L, V), new keys and new values (layers, B, G, S, D)."""
        logits, *new = self.session.run(self._outputs, feeds)
        return logits, np.stack(new[0::2]), np.stack(new[1::2])

    def start(self, ids: Sequence[int]) -> tuple[list[int], tuple[Array, Array]]:
        """Split a sequence into what is left to compute and the past to begin with, (layers, 1, G, P, D)."""
        k, v = (part[:, None] for part in self._prefix)
        size = len(self.prefix_ids)
        if list(ids[:size]) == self.prefix_ids and len(ids) > size:
            return list(ids[size:]), (k, v)
        nothing = (k[:, :, :, :0], v[:, :, :, :0])
        if self._settled_layer is None or len(ids) < 2:
            return list(ids), nothing
        _, *first = self.run(self.feeds(np.array([ids[:1]], np.int64), nothing, np.zeros(1, np.int64)))
        for part, shipped in zip(first, (k, v), strict=True):
            part[self._settled_layer :] = shipped[self._settled_layer :]
        return list(ids[1:]), (first[0], first[1])

    def score(self, ids: Sequence[int]) -> Array:
        """Logits (len(ids) - 1, V) at positions 1 … : position 0 is often the prefix, which the artifact never runs."""
        rest, past = self.start(ids)
        logits, _, _ = self.run(self.feeds(np.array([rest], np.int64), past, np.array([past[0].shape[3]], np.int64)))
        return logits[0, 1 - len(ids) :]

    def generate(self, prompts: Sequence[Sequence[int]], limit: int, eos_ids: frozenset[int]) -> list[list[int]]:
        """Greedy answers for a batch of prompts, without the end-of-sequence token."""
        rows = [self._prefill(prompt) for prompt in prompts]
        filled = np.array([k.shape[2] for _, k, _ in rows], np.int64)
        shape = (self.num_layers, len(rows), self.num_kv_heads, int(filled.max()) + limit, self.head_dim)
        keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for row, (_, k, v) in enumerate(rows):
            keys[:, row, :, : k.shape[2]], values[:, row, :, : k.shape[2]] = k, v
        answers: list[list[int]] = [[] for _ in rows]
        tokens = np.array([token for token, _, _ in rows], np.int64)
        open_rows = [token not in eos_ids for token in tokens]
        for _ in range(limit):
            for row, token in enumerate(tokens):
                if open_rows[row]:
                    answers[row].append(int(token))
            room = int(filled.max())
            past = (keys[:, :, :, :room], values[:, :, :, :room])
            logits, k, v = self.run(self.feeds(tokens[:, None], past, filled))
            for row, at in enumerate(filled):
                keys[:, row, :, at], values[:, row, :, at] = k[:, row, :, 0], v[:, row, :, 0]
            filled += 1
            tokens = logits[:, 0].argmax(-1)
            open_rows = [alive and int(token) not in eos_ids for alive, token in zip(open_rows, tokens, strict=True)]
            if not any(open_rows):
                break
        return [answer[:limit] for answer in answers]

    def _prefill(self, prompt: Sequence[int]) -> tuple[int, Array, Array]:
        rest, past = self.start(prompt)
        feeds = self.feeds(np.array([rest], np.int64), past, np.array([past[0].shape[3]], np.int64))
        feeds["logits_at"] = np.array([[len(rest) - 1]], np.int64)
        logits, k, v = self.run(feeds)
        k, v = (np.concatenate([old[:, 0], new[:, 0]], axis=2) for old, new in zip(past, (k, v), strict=True))
        return int(logits[0, 0].argmax()), k, v
