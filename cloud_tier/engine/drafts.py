"""Where drafts come from: what a sequence said before, or a smaller model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from cloud_tier.engine.messages import Compute, Segment
from cloud_tier.engine.sequence import Sequence as Request
from router.base.errors import in_words

if TYPE_CHECKING:
    from cloud_tier.engine.model import Computed

log = structlog.get_logger("cloud_tier.engine")

_FAILURES = 3  # after which a model drafts no more

Asked = tuple[Request, int]
"""A sequence whose newest token is not computed yet, and the most tokens that may be drafted for it."""


class Drafts(Protocol):
    """What drafts for greedy sequences. Nothing depends on it but time: whatever is wrong is refused.

    What fails in drafting ends no step: it drafts nothing then.
    """

    def room(self, request: Request, most: int) -> int:
        """Return how many tokens it would draft, at most `most`."""
        ...

    def draft(self, asked: Sequence[Asked]) -> dict[int, tuple[int, ...]]:
        """Return drafts by handle; every sequence has blocks for its newest token and for what is asked."""
        ...

    def released(self, handles: Sequence[int]) -> None:
        """Hear that these sequences lost their blocks."""
        ...


class NgramDrafts:
    """See `speculation.NgramIndex`."""

    def room(self, request: Request, most: int) -> int:
        return len(request.ngrams.draft(request.tokens, most))

    def draft(self, asked: Sequence[Asked]) -> dict[int, tuple[int, ...]]:
        return {request.handle: tuple(request.ngrams.draft(request.tokens, most)) for request, most in asked}

    def released(self, handles: Sequence[int]) -> None:
        pass


class ModelDrafts:
    """A smaller model continues greedily (Leviathan, Kalman and Matias 2023).

    Its keys and values lie in a cache of its own, in blocks of the same numbers. It computes a sequence's whole text,
    those parts of it included that the large model found in its prefix cache.

    Args:
        compute: its forward pass.
        token_budget: most tokens of one pass.
    """

    def __init__(self, compute: Callable[[Compute], Computed], token_budget: int) -> None:
        self._compute = compute
        self._token_budget = token_budget
        self._failures = 0
        # By handle: how many positions hold what the sequence says, and the tokens that were drafted behind them.
        self._held: dict[int, tuple[int, list[int]]] = {}
        self._released: list[int] = []

    def room(self, request: Request, most: int) -> int:  # noqa: ARG002 - it always drafts
        return most if self._failures < _FAILURES else 0

    def draft(self, asked: Sequence[Asked]) -> dict[int, tuple[int, ...]]:
        try:
            return self._draft(asked)
        except Exception as error:  # answers do not depend on it; after some failures it is left alone
            self._failures += 1
            self._held.clear()  # nothing is known of what was computed
            ends = self._failures == _FAILURES
            log.warning("drafting failed", ends=ends, error=in_words(error), exc_info=True)
            return {}

    def _draft(self, asked: Sequence[Asked]) -> dict[int, tuple[int, ...]]:
        drafts: dict[int, list[int]] = {}
        wanted = {request.handle: most for request, most in asked}
        runs = {request.handle: _runs(request) for request, _ in asked}
        left, segments = self._token_budget, []
        for request, _ in asked:
            start = self._agreed(request)
            tokens = request.tokens[start : start + left]
            if not tokens:
                continue
            left -= len(tokens)
            whole = start + len(tokens) == len(request.tokens)
            segments.append(Segment(start, tokens, runs[request.handle], whole, request.handle))
            if whole:
                drafts[request.handle] = []
            self._held[request.handle] = (start + len(tokens), [])
        while segments:
            following = []
            for handle, token in self._likeliest(segments).items():
                drafts[handle].append(token)
                if len(drafts[handle]) < wanted[handle]:
                    length, drafted = self._held[handle]
                    at = length + len(drafted)
                    drafted.append(token)
                    following.append(Segment(at, [token], runs[handle], draws=True, handle=handle))
            segments = following
        return {handle: tuple(draft) for handle, draft in drafts.items()}

    def released(self, handles: Sequence[int]) -> None:
        self._released += handles
        for handle in handles:
            self._held.pop(handle, None)

    def _likeliest(self, segments: Sequence[Segment]) -> dict[int, int]:
        """Compute the segments; return the likeliest next token of those that draw, by handle."""
        released, self._released = self._released, []
        logits = self._compute(Compute(list(segments), [], released)).logits
        handles = [segment.handle for segment in segments if segment.draws]
        return dict(zip(handles, logits.argmax(dim=-1).tolist(), strict=True)) if logits is not None else {}

    def _agreed(self, request: Request) -> int:
        """Return how many positions hold what the sequence says, its newest token never among them."""
        length, drafted = self._held.get(request.handle, (0, []))
        behind = request.tokens[length:]
        for token, said in zip(drafted, behind, strict=False):
            if token != said:
                break
            length += 1
        return min(length, len(request.tokens) - 1)


def _runs(request: Request) -> list[tuple[int, int]]:
    return list(request.blocks.runs) if request.blocks is not None else []
