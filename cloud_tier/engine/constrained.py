"""Requests whose answers have to match something: matchers are made beside the steps, logits are masked in them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from cloud_tier.engine.protocol import EngineRequest
from models.text.grammar import Grammars, Matcher
from models.text.tokenizer import Tokenizer
from router.base.errors import RequestFailed


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
    def ready(self) -> bool:
        """Whether `take` would return any."""
        return any(made.done() for _, made in self._waiting.values())

    def add(self, handle: int, request: EngineRequest) -> None:
        """Begin to make the matcher of a request that has a constraint."""
        constraint = request.sampling.constraint
        if constraint is None:
            raise ValueError(f"request {request.request_id!r} has no constraint")
        made = self._grammars.begin(constraint, request.said)
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


@torch.inference_mode()
def mask_rows(logits: torch.Tensor, rows: Rows[tuple[int, Matcher]]) -> dict[int, str]:
    """Take every token away that may not come next; return why not, by row, where nothing may be said of it.

    Args:
        logits: float32 (rows, vocab); overwritten.
        rows: constrained ones, and their matchers.
    """
    masks = {row: _mask(matcher, logits.shape[-1]) for row, matcher in rows}
    found = {row: mask for row, mask in masks.items() if not isinstance(mask, str)}
    if found:
        allowed = torch.from_numpy(np.stack([*found.values()])).to(logits.device)
        index = torch.tensor([*found], device=logits.device)
        logits[index] = logits[index].masked_fill_(~allowed, -torch.inf)
    return {row: why for row, why in masks.items() if isinstance(why, str)}


def _mask(matcher: Matcher, vocab_size: int) -> npt.NDArray[np.bool_] | str:
    """Return which tokens may come next, or why that cannot be said any more."""
    try:
        return matcher.mask(vocab_size)
    except RequestFailed as error:
        return error.message
