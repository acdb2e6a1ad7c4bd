"""What a simulation is given and what it returns: requests with the truth about their answers, and one row for each."""

from __future__ import annotations

from dataclasses import dataclass

from router.base.structs import FrozenStruct
from router.values.prediction import Prediction
from router.values.request import Objective

BYTES_A_TOKEN = 4.0
"""Size of a prompt token on the wire, where a trace does not tell: English text under a byte-pair tokenizer."""

NO_PROMISE = Objective()


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a trace. The router never sees `answer_tokens`, `weight` and `kind`.

    Attributes:
        arrival_s: seconds after the begin of the simulation, ascending in a trace.
        answer_tokens: how long the answer would become by itself.
        objective: what the caller asks for; its session, priority and locality too.
        max_tokens: the caller's own cap, None without one.
        weight: what the answer is worth at quality 1.
        caller: digest of the key that it comes with.
        kind: a label that results may be grouped by, e.g. the part of a mixture.
        prompt_bytes: size on the wire, 0 for `BYTES_A_TOKEN` a token.
        ignore_eos: the answer runs to `max_tokens`.
        model: a family or one variant; empty for the family of the world.
        token_ids: of the prompt, None where nobody knows them; answer_ids: of the answer as it would become by itself.
            What a device with a prefix cache finds, and what the router can know of it, depends on them.
    """

    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    objective: Objective = NO_PROMISE
    max_tokens: int | None = None
    weight: float = 1.0
    caller: str = ""
    kind: str = ""
    prompt_bytes: int = 0
    ignore_eos: bool = False
    model: str = ""
    token_ids: tuple[int, ...] | None = None
    answer_ids: tuple[int, ...] = ()

    @property
    def asked_tokens(self) -> int:
        """Length of a whole answer: what it would become by itself, under the caller's own cap."""
        return self.answer_tokens if self.max_tokens is None else min(self.answer_tokens, self.max_tokens)

    @property
    def wire_bytes(self) -> int:
        return self.prompt_bytes or round(self.prompt_tokens * BYTES_A_TOKEN)


class SimRow(FrozenStruct, frozen=True):
    """What became of one request. Seconds count from its arrival; None where it never came so far.

    Attributes:
        index: position in the trace.
        outcome: a value of `router.values.request.Outcome`.
        reason: a code of `router.dispatch.records.record.REASONS`, empty where nobody served it.
        variant, tier, quality: of the rung that served it; empty and 0 where none did.
        tokens: what the caller got.
        whole: it got the whole answer, as long as it asked for.
        kept: whole, and every promise that it asked for was kept.
        value: weight · quality, if kept; less by the objective's own slope after its deadline.
        decisions: how often the router decided about it.
        predicted_ttft_s, predicted_ttft_high_s, predicted_finish_s, predicted_finish_high_s: as first predicted.
        last_s: when its last text came, whole or not.
        cached_tokens: of its prompt, as the replica told them; None where it tells nothing.
        bound_s: when it was bound to the replica that served it; told: what was predicted at that moment, from then on.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    kind: str
    outcome: str
    reason: str
    variant: str
    tier: str
    quality: float
    ttft_s: float | None
    finish_s: float
    tokens: int
    whole: bool
    kept: bool
    value: float
    decisions: int
    predicted_ttft_s: float | None = None
    predicted_ttft_high_s: float | None = None
    predicted_finish_s: float | None = None
    predicted_finish_high_s: float | None = None
    last_s: float | None = None
    cached_tokens: int | None = None
    bound_s: float | None = None
    told: Prediction | None = None
