"""A request as decisions see it, and how many tokens it asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from router.signals.length import LengthWatch
from router.values.feature import Feature
from router.values.replica import ReplicaInfo
from router.values.request import InferenceRequest, Objective
from router.values.settings import RouterSettings


class PendingRequest:
    """A request as the filters see it.

    Attributes:
        request: what is left of it: `prompt_tokens` holds the text emitted so far, and so does `continuation_tokens`.
        failed: replica ids that failed for it, and what it met there.
        wait_until_s: when it is given up, on the tier's clock.
        length: what is believed of the length of its whole answer.
        refused_by: who refused it as its caller's mistake.
        task: what is asked of the model.
        left_tokens: longest rest of the answer under the caller's cap, None without one.
        least_prompt_tokens: what the prompt surely has.
    """

    def __init__(
        self,
        request: InferenceRequest,
        failed: Mapping[str, str],
        wait_until_s: float,
        length: LengthWatch,
        refused_by: tuple[ReplicaInfo, ...] = (),
    ) -> None:
        cap = request.sampling.max_tokens
        self.request = request
        self.failed = failed
        self.wait_until_s = wait_until_s
        self.length = length
        self.refused_by = refused_by
        self.task = request.task
        self.left_tokens = None if cap is None else max(1, cap - request.continuation_tokens)
        self.least_prompt_tokens = request.least_prompt_tokens
        self._defaulted: Objective | None = None
        self._needs: frozenset[Feature] | None = None

    @property
    def whole_tokens(self) -> float:
        """Length of the prompt and the longest answer that the caller's cap allows, infinity without one."""
        left_tokens = self.left_tokens
        return math.inf if left_tokens is None else self.least_prompt_tokens + left_tokens

    @property
    def needs(self) -> frozenset[Feature]:
        """What a replica has to do for it; found once, for all decisions."""
        found = self._needs
        if found is None:
            found = self._needs = self.request.needs()
        return found

    def objective_with(self, ttft_s: float) -> Objective:
        """Return the objective with a default TTFT; the last one, if that is it: many decisions ask for the same."""
        found = self._defaulted
        if found is None or found.ttft_s != ttft_s:
            found = self._defaulted = replace(self.request.objective, ttft_s=ttft_s)
        return found

    def needed_tokens(self, settings: RouterSettings) -> int:
        """Shortest window that it may be served with."""
        left_tokens = self.left_tokens
        least = 1 if left_tokens is None else min(left_tokens, settings.min_answer_tokens)
        return self.least_prompt_tokens + least

    def kv_tokens(self, settings: RouterSettings) -> int:
        """Room in a KV cache with which it may begin."""
        return self.needed_tokens(settings) + self.request.prompt_slack

    def most_tokens(self, context_tokens: int) -> int:
        """Longest rest of the answer that the caller's cap and a window of that length allow."""
        room, left_tokens = context_tokens - self.least_prompt_tokens, self.left_tokens
        return max(1, room if left_tokens is None else min(left_tokens, room))

    def expected_tokens(self, context_tokens: int) -> int:
        """Expected length of the rest of the answer: never more than a window of that length leaves."""
        most = self.most_tokens(context_tokens)
        if self.request.sampling.ignore_eos:
            return most
        return max(1, round(self.length.curve.expected_left(self.request.continuation_tokens, most)))

    def longest_tokens(self, context_tokens: int) -> int:
        """0.9 quantile of its length, within that window; 0 for an answer that has begun."""
        begun = self.request.continuation_tokens > 0
        return 0 if begun else min(self.length.longest, self.most_tokens(context_tokens))
