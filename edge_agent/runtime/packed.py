"""What every runtime over this graph contract shares: sequences, the KV pack, and steps bound to tensors.

The graph takes the past as inputs and returns only the keys and values of the new positions. In a decode step the
executor reads the pack of the open sequences in place, and one numpy assignment a sequence stores what it returned.

What a sequence leaves behind may be kept, parked in the memory of free slots, for a later one that begins alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_agent.runtime.kept import LEAST_TOKENS, KeptCache, KeptCaches
from edge_agent.runtime.kv_pack import KvPack, KvShape
from edge_agent.runtime.manifest import Manifest, Prefix
from edge_agent.runtime.protocol import Logits, RuntimeFacts, RuntimeRequest, StepInput

Tensors = Mapping[str, npt.NDArray[Any]]
Key = tuple[int, int, int, int, int]

_MASKED = np.float32(-1e9)
_COPY_BELOW = 0.75


class Executor(Protocol):
    """Runs the graph on tensors that it can read and write in place.

    Attributes:
        min_past_tokens: shortest past it accepts; 1 where a tensor must not be empty.
        owns_memory: tensors must come from `empty`, not from anywhere.
        scored_tokens: most positions of one row whose logits it tells at once.
    """

    name: str
    providers: tuple[str, ...]
    fallbacks: tuple[str, ...]
    min_past_tokens: int
    owns_memory: bool
    scored_tokens: int

    def empty(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Return a zeroed, contiguous tensor."""
        ...

    def bind(self, inputs: Tensors, outputs: Tensors) -> Callable[[], None]:
        """Return what runs the graph once from `inputs` into `outputs`, for as often as it is called."""
        ...

    def release_memory(self) -> None:
        """Give back what an idle executor does not need."""
        ...

    def close(self) -> None:
        """Free the weights."""
        ...


@dataclass(slots=True)
class _Step:
    """The tensors of one shape of step, bound to the executor; valid while the pack keeps its layout.

    Attributes:
        key: (first row, rows, tokens, past tokens in the pack, past tokens passed).
    """

    key: Key
    run: Callable[[], None]
    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    new: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class _Open:
    """An open sequence; the row of the pack that it has is its index among them.

    Attributes:
        ids: what the row's positions stand for.
        first_chunk, exact_tokens: see `KeptCache`.
        sound: nothing has gone wrong with it, so that its cache may be kept.
    """

    sequence: int
    caller: str
    ids: list[int] = field(default_factory=list)
    first_chunk: int = 0
    exact_tokens: int = 0
    sound: bool = True


class PackedRuntime:
    """`Runtime` over an executor.

    A sequence whose keys or values are not finite gets logits of NaN, for which its owner is expected to end it.
    Nothing of it is left in the cache that could reach another sequence.
    """

    def __init__(self, executor: Executor, manifest: Manifest, prefix: Prefix | None, request: RuntimeRequest) -> None:
        self._executor = executor
        self._manifest = manifest
        self._prefix = prefix
        context_tokens = min(request.context_tokens, manifest.context_tokens)
        shape = KvShape(manifest.num_layers, manifest.num_kv_heads, manifest.head_dim, request.slots, context_tokens)
        memory = (lambda count: executor.empty((count,), np.float32)) if executor.owns_memory else None
        self._pack = KvPack(shape, memory)
        self._open: list[_Open] = []
        self._kept = KeptCaches()
        self._chunk_tokens = request.chunk_tokens
        self._next_sequence = 0
        self._decode: _Step | None = None
        self.facts = RuntimeFacts(
            name=executor.name,
            variant=manifest.variant,
            vocab_size=manifest.vocab_size,
            context_tokens=context_tokens,
            slots=request.slots,
            kv_bytes_per_token=shape.bytes_per_token,
            providers=executor.providers,
            fallbacks=(*request.missed, *executor.fallbacks),
            notes=request.notes,
            scored_tokens=executor.scored_tokens,
        )

    @property
    def kv_bytes(self) -> int:
        return (sum(self._pack.lengths) + self._pack.parked_tokens) * self.facts.kv_bytes_per_token

    def open(
        self, token_ids: Sequence[int], caller: str = "", *, exact: bool = False, from_scratch: bool = False
    ) -> tuple[int, int]:
        opened = _Open(self._next_sequence, caller)
        found = None
        if not from_scratch:
            found = self._kept.longest(caller, token_ids, self._chunk_tokens if exact else None)
        if found is not None:
            kept, tokens = found
            self._go_on(kept, tokens)
            opened.ids += token_ids[:tokens]
            opened.first_chunk, opened.exact_tokens = kept.first_chunk, min(kept.exact_tokens, tokens)
        else:
            self._begin(opened, [] if from_scratch else token_ids)
        self._next_sequence += 1
        self._open.append(opened)
        if not opened.ids and len(token_ids) > 1 and self._settles and not from_scratch:
            self._feed_first(opened, token_ids[0])
        return opened.sequence, len(opened.ids)

    @property
    def _settles(self) -> bool:
        return self._prefix is not None and self._prefix.settled_layer is not None

    def _feed_first(self, opened: _Open, token_id: int) -> None:
        """Compute the first token alone, so that what no INT8 scale holds can be put right before others look at it."""
        try:
            self.forward([StepInput(opened.sequence, [token_id], want_logits=False)])
        except Exception:
            self.close_sequence(opened.sequence)
            raise
        opened.first_chunk = opened.exact_tokens = 1

    def _settle(self, step: _Step, lengths: npt.NDArray[np.int64]) -> None:
        """Put what is known of a first token in the place of what the step has computed of it."""
        prefix = self._prefix
        if prefix is None or len(prefix.token_ids) != 1:
            return
        for offset in np.flatnonzero(lengths == 0):
            own = step.ids[offset, 0] == prefix.token_ids[0]
            if not own and prefix.settled_layer is None:
                continue
            known = 0 if own else 2 * (prefix.settled_layer or 0)
            step.new[known:, offset] = prefix.kv[known:, 0]
            if prefix.logits is not None:
                step.logits[offset, 0] = prefix.logits

    def _go_on(self, kept: KeptCache, tokens: int) -> None:
        """Add a row that begins with what was kept; that stays where it holds more, unless it is the next to go."""
        stays = len(kept.ids) - tokens >= LEAST_TOKENS
        if stays and not self._pack.free_slots:
            stays = self._kept.oldest() is not kept
            if stays:
                self.trim_kept(len(self._kept) - 1)
        self._pack.unpark(kept.parked, tokens, keep=stays)
        if stays:
            self._kept.touch(kept)
        else:
            self._kept.remove(kept)

    def _begin(self, opened: _Open, token_ids: Sequence[int]) -> None:
        """Add a row that holds nothing but the model's own prefix, where the prompt begins with that."""
        if self._kept and not self._pack.free_slots:
            self.trim_kept(len(self._kept) - 1)
        row = self._pack.add_row()
        prefix = self._prefix
        if prefix is None or len(token_ids) <= len(prefix.token_ids):
            return
        if tuple(token_ids[: len(prefix.token_ids)]) == prefix.token_ids:
            self._pack.append(row, prefix.kv)
            opened.ids += prefix.token_ids
            opened.first_chunk = opened.exact_tokens = len(prefix.token_ids)

    def forward(self, batch: Sequence[StepInput]) -> Logits:
        tokens = len(batch[0].token_ids)
        if tokens == 0 or any(len(item.token_ids) != tokens for item in batch):
            raise ValueError("every input of a batch must feed the same number of ids, at least one")
        rows = self._gather(batch)
        first = min(rows)
        every = batch[0].every and tokens > 1
        step = self._step(first, len(rows), tokens, every=every)
        lengths = np.array(self._pack.lengths[first : first + len(rows)])
        for item, row in zip(batch, rows, strict=True):
            step.ids[row - first] = item.token_ids
        step.positions[:] = lengths[:, None] + np.arange(tokens)
        past = step.key[4]
        step.bias[:, 0, :, :past] = np.where(np.arange(past) < lengths[:, None], np.float32(0), _MASKED)[:, None]
        step.run()
        if tokens == 1:
            self._settle(step, lengths)
        unsound = self._pack.append(first, step.new)
        wanted = [row - first for item, row in zip(batch, rows, strict=True) if item.want_logits]
        for offset in unsound:
            self._open[first + offset].sound = False
        if unsound:
            if len(wanted) < len(rows):
                self._pack.lengths[first : first + len(rows)] = lengths.tolist()
                raise ArithmeticError("the keys and values of a prompt are not finite, or beyond all measure")
            step.logits[unsound] = np.nan
        for item, row in zip(batch, rows, strict=True):
            opened = self._open[row]
            if len(rows) == 1 and tokens == self._chunk_tokens and past == opened.exact_tokens == len(opened.ids):
                opened.exact_tokens += tokens
            opened.ids += item.token_ids
        logits = step.logits[0] if every else step.logits[wanted, 0]
        if not np.isfinite(logits).all():
            self._distrust()
        return logits

    def _distrust(self) -> None:
        """Whatever the step has read, nobody reads it again."""
        self._pack.scrub()
        self._kept.clear()
        for opened in self._open:
            opened.sound = False

    def close_sequence(self, sequence: int, *, keep: bool = False) -> None:
        row = self._row(sequence)
        if not (keep and self._keep(self._open[row], row)):
            self._pack.remove_row(row)
        last = self._open.pop()
        if row < len(self._open):
            self._open[row] = last

    def _keep(self, closed: _Open, row: int) -> bool:
        """Park the row of a sequence for its caller; False where there is nothing worth it."""
        if not closed.sound or len(closed.ids) < LEAST_TOKENS or len(closed.ids) != self._pack.lengths[row]:
            return False
        ids = np.array(closed.ids, np.int64)
        longer = self._kept.holds(closed.caller, ids)
        if longer is not None:
            self._kept.touch(longer)
            return False
        for shorter in self._kept.within(closed.caller, ids):
            self._kept.remove(shorter)
            self._pack.forget(shorter.parked)
        try:
            parked, _ = self._pack.park(row)
        except MemoryError:
            return False
        self._kept.add(KeptCache(closed.caller, ids, parked, closed.first_chunk, closed.exact_tokens))
        return True

    def trim_kept(self, most: int) -> None:
        while len(self._kept) > most:
            oldest = self._kept.oldest()
            self._kept.remove(oldest)
            self._pack.forget(oldest.parked)

    def release_memory(self) -> None:
        self._decode = None
        self._pack.release()
        self._executor.release_memory()

    def close(self) -> None:
        self._decode = None
        self.facts = dataclasses.replace(self.facts, slots=0)
        self._executor.close()
        self._open.clear()
        self._kept.clear()
        self._pack.lengths.clear()
        self._pack.forget_all()
        self._pack.release()

    def _row(self, sequence: int) -> int:
        for row, opened in enumerate(self._open):
            if opened.sequence == sequence:
                return row
        raise RuntimeError(f"sequence {sequence} is not open")

    def _gather(self, batch: Sequence[StepInput]) -> list[int]:
        """Return the row of each input, after moving them next to each other if they are not."""
        rows = [self._row(item.sequence) for item in batch]
        if max(rows) - min(rows) + 1 == len(rows):
            return rows
        strangers = [row for row in range(len(rows)) if row not in rows]
        for row in sorted(rows):
            if row >= len(rows):
                other = strangers.pop()
                self._pack.swap_rows(row, other)
                self._open[row], self._open[other] = self._open[other], self._open[row]
        return [self._row(item.sequence) for item in batch]

    def _step(self, first: int, rows: int, tokens: int, *, every: bool = False) -> _Step:
        """Return bound tensors for this shape of step; those of the last decode step are kept."""
        self._pack.reserve(1)
        in_pack = self._pack.past_tokens
        passed = in_pack
        length = self._pack.lengths[first]
        if rows == 1 and length < _COPY_BELOW * in_pack - 64 and length >= self._executor.min_past_tokens:
            passed = length  # a short row beside a long one: copying it is cheaper than attending to the padding
        elif rows == 1 and tokens > 1 and length >= self._executor.min_past_tokens:
            passed = length
        key = (first, rows, tokens, in_pack, passed)
        if self._decode is not None and self._decode.key == key and passed == in_pack:
            return self._decode
        step = self._bind(key, every=every)
        if tokens == 1:
            self._decode = step
        return step

    def _bind(self, key: Key, *, every: bool) -> _Step:
        first, rows, tokens, in_pack, passed = key
        manifest, empty = self._manifest, self._executor.empty
        past = self._pack.past(first, rows)
        if passed != in_pack:
            short = empty((*past.shape[:3], passed, past.shape[4]), np.float32)
            short[:] = past[:, :, :, :passed]
            past = short
        heads, width = manifest.num_kv_heads, manifest.head_dim
        inputs: dict[str, npt.NDArray[Any]] = {
            "input_ids": empty((rows, tokens), np.int64),
            "position_ids": empty((rows, tokens), np.int64),
            "attention_bias": empty((rows, 1, tokens, passed + tokens), np.float32),
            "logits_at": empty((rows, tokens if every else 1), np.int64),
        }
        inputs["attention_bias"][:, 0, :, passed:] = np.triu(np.full((tokens, tokens), _MASKED, np.float32), 1)
        inputs["logits_at"][:] = np.arange(tokens) if every else tokens - 1
        new = empty((2 * manifest.num_layers, rows, heads, tokens, width), np.float32)
        logits = empty((rows, tokens if every else 1, manifest.vocab_size), np.float32)
        outputs: dict[str, npt.NDArray[Any]] = {"logits": logits}
        step_tensors = (inputs["input_ids"], inputs["position_ids"], inputs["attention_bias"])
        for index in range(2 * manifest.num_layers):
            name = f"{'kv'[index % 2]}.{index // 2}"
            inputs[f"past_{name}"] = past[index]
            outputs[f"new_{name}"] = new[index]
        return _Step(key, self._executor.bind(inputs, outputs), *step_tensors, new, logits)
