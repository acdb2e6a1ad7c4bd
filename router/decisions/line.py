"""One decision as one JSON value: what `/v1/decisions/{id}` shows, and a line of the decision file.

Times are milliseconds since the request was accepted, or durations; `accepted_unix_s` alone is a time of day. No field
holds text of a prompt or an answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

LINE_VERSION = 1


class AskedFor(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller asked for.

    Attributes:
        default_ttft_ms: the tier's own TTFT, where it stood in for one that the caller did not ask for.
        late_value_ms: after the deadline, the value of the answer falls to 0 over so long.
        shorten: an overloaded tier may shorten the answer.
    """

    ttft_ms: float | None = None
    default_ttft_ms: float | None = None
    tpot_ms: float | None = None
    deadline_ms: float | None = None
    late_value_ms: float | None = None
    shorten: bool = False
    priority: int = 0
    locality: str = "any"
    min_quality: float = 0.0


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """What else of a request a prediction depends on.

    Attributes:
        prompt_slack_tokens: by how much `prompt_tokens` may be too high.
        ignore_eos: generation goes on past the end-of-turn token.
        stop: the caller gave stop strings.
        expected_tokens: what the answer was expected to run to, at the last decision.
        waiting, waited_ms: requests in the tier's queue, and accepted → then, at the last decision.
        decisions: how often it was decided about.
        overloaded: the tier was overloaded at the last decision.
        session, caller: in the file as keyed hashes; None where there is none, or where they are not told.
    """

    prompt_bytes: int = 0
    prompt_slack_tokens: int = 0
    ignore_eos: bool = False
    stop: bool = False
    expected_tokens: int | None = None
    waiting: int | None = None
    waited_ms: float | None = None
    decisions: int = 0
    overloaded: bool = False
    session: str | None = None
    caller: str | None = None


class CandidateRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica as the last decision saw it: chosen, not chosen, or rejected; what does not apply is left out.

    Attributes:
        device: replicas of one device share its slots.
        free … finish_high_ms: the prediction, from the moment of the decision; `_high` is meant to hold 9 times in 10.
        session: it served the request's session before.
        price: of serving it there, in answers of full quality.
        at_stake: what those who ran on its device stood to lose by the prompt, in answers of full quality.
        not_chosen, rejected, why: a code of `router.dispatch.records.record`, and the figures behind it.
        available … load_age_ms: its load.
        prefill_tokens_per_s, decode_tokens_per_s, decode_batch_slope: its speed before anything was observed.
        rtt_ms, uplink_bytes_per_s: the link to it, where there is one.
    """

    replica: str
    tier: str
    variant: str
    family: str | None = None
    endpoint: str | None = None
    device: str | None = None
    remote: bool = False
    rung: int | None = None
    quality: float | None = None
    context_tokens: int | None = None
    chosen: bool = False
    free: bool | None = None
    wait_ms: float | None = None
    ttft_ms: float | None = None
    ttft_high_ms: float | None = None
    tpot_ms: float | None = None
    tpot_high_ms: float | None = None
    finish_ms: float | None = None
    finish_high_ms: float | None = None
    session: bool = False
    price: float = 0.0
    at_stake: float = 0.0
    not_chosen: str | None = None
    rejected: str | None = None
    why: str | None = None
    available: bool | None = None
    slots: int | None = None
    running: int | None = None
    queued: int | None = None
    queued_prefill_tokens: int | None = None
    pending_decode_tokens: int | None = None
    kv_free_tokens: int | None = None
    load_age_ms: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_batch_slope: float | None = None
    rtt_ms: float | None = None
    uplink_bytes_per_s: float | None = None


class ChosenRow(msgspec.Struct, frozen=True, kw_only=True):
    """Where it went.

    Attributes:
        reason, why: a code of `router.dispatch.records.record.REASONS`, and what it means.
        rank: who of those that wait goes first, among equal priority: the higher.
        kept_probability: of the whole promise, as it was chosen for; None where the policy asks for none.
    """

    replica: str
    tier: str
    variant: str
    rung: int
    reason: str
    why: str
    degraded: bool
    max_tokens: int | None = None
    rank: float = 0.0
    kept_probability: float | None = None


class CanaryRow(msgspec.Struct, frozen=True):
    """The canary that a request met.

    Attributes:
        side: the deployment that it was drawn for: `canary` or `stable`.
        weight: share of the requests that the canary had then.
        stepped_back: why it has none any more; None while it has not stepped back.
    """

    name: str
    side: str
    weight: float
    stepped_back: str | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One request's story.

    Attributes:
        canary: the canary that the model's replicas are divided by, None without one.
        events: what happened, in order: `at_ms`, `event` and what goes with it.
        outcome: `running` while it does, else a word of `router.values.request.Outcome`.
        error, error_code: why it was refused or broke off.
        retry_after_ms, should_retry: what a refused caller was told.
        predicted_…: accepted → then, as first predicted.
        finish_reason: `stop` or `length`; None for an answer that never ended.
        cut: a cap or the deadline cut the answer: it would have been longer than `tokens`.
        kept: promise → whether it was kept.
        accepted_unix_s: when it was accepted, in seconds since 1970; only lines of a file have it.
    """

    request_id: str
    model: str
    prompt_tokens: int
    policy: str
    objective: AskedFor
    max_tokens: int | None = None
    features: Features = Features()
    candidates: tuple[CandidateRow, ...] = ()
    chosen: ChosenRow | None = None
    events: tuple[dict[str, Any], ...] = ()
    outcome: str = "running"
    error: str | None = None
    error_code: str | None = None
    retry_after_ms: float | None = None
    should_retry: bool | None = None
    predicted_ttft_ms: float | None = None
    predicted_ttft_high_ms: float | None = None
    predicted_finish_ms: float | None = None
    predicted_finish_high_ms: float | None = None
    ttft_ms: float | None = None
    finish_ms: float | None = None
    tokens: int = 0
    finish_reason: str | None = None
    cut: bool = False
    kept: dict[str, bool] = {}
    accepted_unix_s: float | None = None
    canary: CanaryRow | None = None
    v: int = LINE_VERSION

    @property
    def refused(self) -> bool:
        return self.outcome in {"shed", "unavailable", "evicted", "invalid"}

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Decision)


def encode(decision: Decision) -> bytes:
    """Return it as one line of UTF-8, its end included."""
    return _ENCODER.encode(decision) + b"\n"


def decode(line: bytes | str) -> Decision:
    """Read a line; keys that a newer version writes are ignored.

    Raises:
        msgspec.DecodeError: it is no decision, or was cut.
    """
    return _DECODER.decode(line)
