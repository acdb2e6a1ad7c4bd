"""What an operator can tell the router: the `[router]` table of either tier, and what the fleet may change."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=86_400_000)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1_000)]


class BreakerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[router.breaker]`: when an endpoint is left alone, and for how long.

    Attributes:
        failures: consecutive failures that make it suspected, so that a self-test tells; missed probes that open it.
        open_ms: first time it stays open; doubles with every failed trial.
        max_open_ms: longest time it stays open.
        failure_ratio, window: it is also suspected when this share of the last `window` requests failed.
    """

    failures: Count = 3
    open_ms: Milliseconds = 1_000.0
    max_open_ms: Milliseconds = 30_000.0
    failure_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    window: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 20

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        if self.max_open_ms < self.open_ms:
            raise ValueError(f"max_open_ms = {self.max_open_ms} is below open_ms = {self.open_ms}")


class HedgeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[router.hedge]`: a second replica is asked beside one whose first token is late.

    Attributes:
        enabled: whether at all. It never is while requests wait.
        budget: share of all predicted work, in device-seconds, that second attempts may cost.
    """

    enabled: bool = True
    budget: Share = 0.05


class CreditSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[router.credits]`: what tiers below may send here, so that a fleet that comes back does not come at once.

    Attributes:
        enabled: issue credits to tiers that ask for them; without, they send whenever a slot seems free.
        queue_wait_target_ms: mean wait in this tier's queue up to which credits are issued.
        lifetime_ms: a credit that is not used for so long is void.
        reserve: share of the slots whose credits only instances get that have requests of a priority above 0 waiting;
            kept while there are such.
        asks_per_s: polls a second that this tier wants of all tiers below together; a large fleet polls less often.
        max_instances: instances remembered; the one that was silent for longest is forgotten.
    """

    enabled: bool = True
    queue_wait_target_ms: Milliseconds = 250.0
    lifetime_ms: Milliseconds = 2_000.0
    reserve: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.1
    asks_per_s: Annotated[float, msgspec.Meta(ge=1, le=1_000_000)] = 200.0
    max_instances: Count = 65_536


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[router.prices]`: what serving costs besides time, in answers of full quality; 0 is free.

    A replica is chosen for quality × P(promise kept) − its price, so 0.1 means: a tenth of an answer is given up to
    avoid it once.

    Attributes:
        cloud_kilotoken: a thousand tokens, prompt and answer, served by the upstream.
        uplink_mbyte: a million bytes sent to the upstream.
        local_answer: one answer on this device: its energy.
    """

    cloud_kilotoken: Price = 0.0
    uplink_mbyte: Price = 0.0
    local_answer: Price = 0.0


FREE = Prices()


class Fairness(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[router.fairness]`: how far work that costs much may be put back; 0 sets no bound.

    Attributes:
        oldest_first: of the device time given out while others wait, this share goes to who has waited longest for it,
            of the highest priority, whatever that costs, while its promise is more likely kept than not.
        callers: a tenant (or key) that took more device time than its share lately is put back behind the others, by at
            most this factor of value a second; while the queue is full, it is crowded out first. 0: they do not share.
    """

    oldest_first: Share = 0.0
    callers: Annotated[float, msgspec.Meta(ge=0, le=1_000)] = 1_000.0


Pattern = Annotated[str, msgspec.Meta(max_length=256)]


class DeploymentPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which replicas belong to a deployment: shell patterns (`*`, `?`, `[a-c]`), all of which have to match.

    Attributes:
        backend, version, variant, replica: of `ReplicaInfo`; an empty one matches everything.
    """

    backend: Pattern = ""
    version: Pattern = ""
    variant: Pattern = ""
    replica: Pattern = ""

    def __bool__(self) -> bool:
        return bool(self.backend or self.version or self.variant or self.replica)


class QualityProbe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[router.canary.probes]]`: a prompt of the operator's, asked of both deployments by turns.

    Attributes:
        prompt: one message of a user; answered greedily.
        expect: a regular expression that a good answer holds somewhere.
        max_tokens: cap on its answer.
    """

    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=8_192)]
    expect: Annotated[str, msgspec.Meta(min_length=1, max_length=1_024)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 32

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        try:
            re.compile(self.expect)
        except re.error as error:
            raise ValueError(f"expect = {self.expect!r} is no regular expression: {error}") from error


class CanarySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[router.canary]]`: a new deployment of a model beside the one that serves, with a share of its requests.

    It steps back by itself, for good, once it is surely worse: its weight is 0 from then on, until this table changes.

    Attributes:
        name: for logs, metrics and decision records.
        canary: which replicas are the new deployment.
        stable: which it is compared with; without, all others of the model. What is neither serves either side.
        model: a family or a variant; empty for every model that both deployments serve.
        weight: share of the sessions, and of the requests without one, that go to the canary.
        false_alarm: probability that a canary that is not worse ever steps back.
        slower: latencies up to this factor of the stable deployment's are no reason.
        probes: prompts that tell quality.
        probe_interval_ms: from one of them to the next.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
    canary: DeploymentPattern
    stable: DeploymentPattern = DeploymentPattern()
    model: Pattern = ""
    weight: Share = 0.05
    false_alarm: Annotated[float, msgspec.Meta(gt=0, le=0.5)] = 0.05
    slower: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.25
    probes: Annotated[tuple[QualityProbe, ...], msgspec.Meta(max_length=64)] = ()
    probe_interval_ms: Milliseconds = 10_000.0

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        if not self.canary:
            raise ValueError("canary names no replica: set backend, version, variant or replica to a pattern")


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[router]`. Every key can be changed on a running tier.

    Attributes:
        policy: a name of `router.policy.registry`, which checks it.
        ttft_slo_ms: the promise of a request that names none. A request is served late rather than refused when only
            this default is missed; a promise the caller asked for is kept, degraded or refused.
        device_first_quality_slack: rungs whose quality differs by no more than this count as equal, and then the
            device wins. Above it, quality wins.
        max_queue: requests that wait in this tier at once; the next one is shed.
        max_sheddable_queue: the same for requests of negative priority.
        max_wait_ms: longest wait for a free replica.
        first_token_timeout_ms: sent → first token; then the replica counts as failed.
        stall_timeout_ms: longest gap inside a running answer; then the stream counts as broken.
        max_attempts: replicas tried for one request, continuations and those of upstream tiers included.
        overload_enter, overload_leave: share of `max_queue` that waits, at which overload begins and ends. While it
            lasts, answers of callers who allow it (`x-overspill-shorten`) are capped to `overload_answer_tokens`,
            `give_up` is in force, nothing is hedged, and for `quality-in-objective` smaller rungs are good enough.
        overload_answer_tokens: the cap of an answer under overload.
        give_up: `deadline`: under overload, an answer that can no longer keep its deadline, nor any late value, gives
            its slot to others, and its caller gets the text so far. `off`: it runs on to the deadline.
        min_answer_tokens: room for the answer that a window must leave, where it is not capped below; no cap by
            overload is lower.
        expected_answer_tokens: assumed length of an answer before any was seen.
        decision_log: decision records kept for `/v1/decisions`.
        mixing_cost: factor on the cost of a rung that its device does not favour at present (`slo-utility`): two that
            run side by side slow each other.
        breaker, hedge, credits, prices, fairness, canary: see there.
    """

    policy: str = "slo-utility"
    ttft_slo_ms: Milliseconds = 3_000.0
    device_first_quality_slack: Share = 0.05
    max_queue: Count = 64
    max_sheddable_queue: Count = 16
    max_wait_ms: Milliseconds = 30_000.0
    first_token_timeout_ms: Milliseconds = 120_000.0
    stall_timeout_ms: Milliseconds = 20_000.0
    max_attempts: Count = 4
    overload_enter: Share = 0.25
    overload_leave: Share = 0.1
    overload_answer_tokens: Count = 64
    give_up: Literal["deadline", "off"] = "deadline"
    min_answer_tokens: Count = 16
    expected_answer_tokens: Count = 128
    decision_log: Count = 2_048
    mixing_cost: Annotated[float, msgspec.Meta(ge=1, le=100)] = 2.0
    breaker: BreakerSettings = BreakerSettings()
    hedge: HedgeSettings = HedgeSettings()
    credits: CreditSettings = CreditSettings()
    prices: Prices = FREE
    fairness: Fairness = Fairness()
    canary: tuple[CanarySettings, ...] = ()

    def __post_init__(self) -> None:
        """Check what the types cannot say; msgspec puts the key's path in front of a ValueError."""
        if self.overload_leave > self.overload_enter:
            raise ValueError(
                f"overload_leave = {self.overload_leave} is above overload_enter = {self.overload_enter}; "
                "overload must end below where it begins"
            )
        names = [canary.name for canary in self.canary]
        if len(set(names)) != len(names):
            raise ValueError(f"canary: names must be unique; found {', '.join(names)}")
