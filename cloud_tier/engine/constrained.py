"""Requests whose answers have to match something: matchers are made beside the steps, logits are masked in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from cloud_tier.engine.protocol import EngineRequest
from cloud_tier.engine.sequence import Sequence
from models.text.grammar import Grammars, Matcher
from models.text.guide import BIAS_OF_BYTE, Guide, Lookahead
from models.text.tokenizer import Tokenizer

_MOMENT_S = 0.01


class Compiling:
    """Constrained requests that wait for their matcher; no step waits for one.

    Args:
        weights: where the model's tokenizer lies too.

    Attributes:
        wake: called by a thread of its own when a matcher is ready, or could not be made.
    """

    def __init__(self, weights: str) -> None:
        self.wake: Callable[[], object] = lambda: None
        self._grammars = Grammars(lambda: Tokenizer.load(Path(weights)))
        self._waiting: dict[int, tuple[EngineRequest, Future[Matcher]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def others(self) -> int:
        """Count those that do not yield."""
        return sum(not request.yields for request, _ in self._waiting.values())

    @property
    def ready(self) -> bool:
        """Whether `take` would return any."""
        return any(made.done() for _, made in self._waiting.values())

    def add(self, handle: int, request: EngineRequest) -> None:
        """Begin to make the matcher of a request that has a constraint."""
        constraint = request.sampling.constraint
        if constraint is None:
            raise ValueError(f"request {request.request_id!r} has no constraint")
        made = self._grammars.begin(constraint, request.said, request.caller)
        self._waiting[handle] = request, made
        made.add_done_callback(lambda _: self.wake())

    def abort(self, handle: int) -> None:
        """Forget a request; one that is not known is left alone."""
        _, made = self._waiting.pop(handle, (None, None))
        if made is not None:
            made.cancel()

    def take(self) -> list[tuple[int, EngineRequest, Future[Matcher]]]:
        """Return the requests whose matchers are ready, or could not be made, in the order they came."""
        ready = [(handle, *entry) for handle, entry in self._waiting.items() if entry[1].done()]
        for handle, _, _ in ready:
            del self._waiting[handle]
        return ready


class Guided:
    """Sequences under constraints: their masks are found beside the steps, and the late ones among them kept.

    Attributes:
        masking: of their logits.
    """

    def __init__(self, device: torch.device) -> None:
        self.masking = Masking(device)
        self._lookahead = Lookahead()
        self._late: dict[int, tuple[Sequence, torch.Tensor]] = {}

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Find out what may come next in those that are constrained and do not ask first."""
        self._lookahead.begin([sequence.guide for sequence in sequences if sequence.guide is not None])

    def wait(self, sequences: Iterable[Sequence], most_s: float) -> None:
        """Wait for the masks of these, but of none that is known to take long, and at most so long in all."""
        self._lookahead.wait([s.guide for s in sequences if s.guide is not None], most_s)

    def find(self, guides: Rows[Guide], most_s: float) -> None:
        """Find the masks of those whose own choices were refused; wait for them as `wait` does."""
        self._lookahead.find(guides)
        self._lookahead.wait(guides, most_s)

    def keep(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Keep the logits, float32 (1, vocab), of a sequence whose mask is late; nothing is left to compute of it."""
        self._late[sequence.handle] = sequence, logits

    def take_ripe(self) -> list[tuple[Sequence, torch.Tensor]]:
        """Return those that were kept, are neither over nor preempted since, and whose masks are ready now."""
        self._late = {
            handle: (sequence, logits)
            for handle, (sequence, logits) in self._late.items()
            if sequence.blocks is not None and sequence.remaining == 0
        }
        ripe = [(s, logits) for s, logits in self._late.values() if s.guide is not None and s.guide.ready]
        for sequence, _ in ripe:
            del self._late[sequence.handle]
        return ripe

    def wait_for_late(self) -> None:
        """Let a moment pass, if there is nothing to do but to wait for masks."""
        for sequence, _ in self._late.values():
            if sequence.guide is not None:
                sequence.guide.wait(_MOMENT_S)
                return


class Masking:
    """Takes tokens away that may not come next: the bits of all rows are moved at once, and become numbers there."""

    def __init__(self, device: torch.device) -> None:
        self._bias_of_byte = torch.from_numpy(BIAS_OF_BYTE).to(device)

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor, masks: dict[int, npt.NDArray[np.uint8]]) -> None:
        """Mask rows in place.

        Args:
            logits: float32 (rows, vocab).
            masks: by row: uint8 (ceil(vocab / 8),), see `Matcher.mask`.
        """
        if not masks:
            return
        packed = torch.from_numpy(np.stack(list(masks.values()))).to(logits.device)
        biases = F.embedding(packed.int(), self._bias_of_byte).flatten(1)[:, : logits.shape[-1]]
        if list(masks) == list(range(logits.shape[0])):
            logits.add_(biases)
        else:
            logits.index_add_(0, torch.tensor(list(masks), device=logits.device), biases)
