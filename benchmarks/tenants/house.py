"""A whole tier on virtual time: the real gateway, tenants and dispatcher over a simulated device, without sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.telemetry import Telemetry
from router.gateway.app import create_app
from router.gateway.deps import GatewayDeps
from router.simulation.device import Device
from router.simulation.loop import LoopClock, VirtualLoop
from router.simulation.replica import Host, Reachability, SimReplica
from router.simulation.world import DeviceSpec, RungSpec
from router.tenants.settings import TenantSettings
from router.tenants.tenancy import KeySources, Tenancy
from router.values.prompt import Input, Prompt, PromptSize, TextPrompt, TokenizerFacts
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.settings import Fairness, RouterSettings

MODEL = "simulated"
_BATCH_SLOPE = 0.1
KEYS = {"a": "key-of-tenant-a-0123456789", "b": "key-of-tenant-b-0123456789"}


@dataclass(frozen=True)
class Setting:
    """What one arm is made of.

    Attributes:
        callers: of `[router.fairness]`.
        retries: of `[tenants]`.
    """

    callers: float = Fairness().callers
    retries: float = TenantSettings().retries
    slots: int = 8
    prefill_tokens_per_s: float = 2_000.0
    step_ms: float = 20.0

    def cost_s(self, prompt_tokens: float, answer_tokens: float) -> float:
        """Device-seconds that so many tokens cost while all slots are taken."""
        step_s = self.step_ms / 1e3 * (1 + _BATCH_SLOPE * (self.slots - 1)) / self.slots
        return prompt_tokens / self.prefill_tokens_per_s + answer_tokens * step_s


class Words:
    """Counts a prompt of words as so many tokens, whose ids are their lengths."""

    def count(self, model: str, prompt: Input) -> PromptSize:  # noqa: ARG002 - of the protocol
        return PromptSize(len(prompt.text.split()) if isinstance(prompt, TextPrompt) else 1)

    def tokenizer(self, model: str) -> Words:  # noqa: ARG002 - of the protocol
        return self

    def tokenize(
        self,
        prompt: Prompt,
        *,
        special_tokens: bool = True,  # noqa: ARG002
        generation_prompt: bool = True,  # noqa: ARG002
        continuation: str = "",
    ) -> list[int]:
        text = prompt.text if isinstance(prompt, TextPrompt) else ""
        return [len(word) for word in f"{text} {continuation}".split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.token_texts(token_ids))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return ["x" * token for token in token_ids]

    def facts(self) -> TokenizerFacts:
        return TokenizerFacts(None, None, adds_bos=False, chat_template=None)


@dataclass
class House:
    """The tier, and a way in for each tenant."""

    setting: Setting
    tenancy: Tenancy
    dispatcher: Dispatcher
    device: Device
    transport: httpx.AsyncBaseTransport
    telemetry: Telemetry = field(repr=False)

    def served(self, tenant: str) -> tuple[int, int, int]:
        """Answers, prompt tokens and answer tokens that a tenant got so far."""
        found = [counts for (name, _), counts in self.tenancy.ledger.totals.items() if name == tenant]
        return (
            sum(c.requests for c in found),
            sum(c.prompt_tokens for c in found),
            sum(c.completion_tokens for c in found),
        )


@contextlib.asynccontextmanager
async def opened(setting: Setting, loop: VirtualLoop) -> AsyncIterator[House]:
    """Open a tier on the loop."""
    clock, telemetry = LoopClock(loop), Telemetry()
    rung = RungSpec(
        variant=MODEL, quality=1.0, prefill_tokens_per_s=setting.prefill_tokens_per_s, step_ms=setting.step_ms
    )
    spec = DeviceSpec(name="device", slots=setting.slots, rungs=(rung,))
    prior = SpeedPrior(setting.prefill_tokens_per_s, 1e3 / setting.step_ms, rung.batch_slope, "simulation")
    info = ReplicaInfo(
        replica_id="device/simulated",
        endpoint="local",
        tier="cloud",
        remote=False,
        family=MODEL,
        variant=MODEL,
        rung=0,
        quality=1.0,
        context_tokens=rung.context_tokens,
        prior=prior,
        device="device",
    )
    device = Device(spec, loop)
    replica = SimReplica(info, Host(device, None, Reachability()), 0, {})
    settings = RouterSettings(fairness=Fairness(callers=setting.callers), ttft_slo_ms=86_400_000.0)
    dispatcher = Dispatcher([replica], settings, clock=clock, telemetry=telemetry, seed=1)
    keys: Mapping[str, int | None] = dict.fromkeys(KEYS.values())
    tenancy = Tenancy(KeySources.of(keys).directory(), clock, settings=TenantSettings(retries=setting.retries))
    deps = GatewayDeps(
        dispatcher=dispatcher,
        prompts=Words(),
        tier="cloud",
        telemetry=telemetry,
        clock=clock,
        models=lambda: [info],
        tenancy=tenancy,
    )
    async with dispatcher:
        yield House(setting, tenancy, dispatcher, device, httpx.ASGITransport(create_app(deps)), telemetry)


def name_of(tenant: str) -> str:
    """What the ledger calls a tenant: one of a key without a name is called by its digest."""
    directory = KeySources.of({KEYS[tenant]: None}).directory()
    return next(iter(directory.tenants))


class GivesUp(httpx.AsyncBaseTransport):
    """A transport whose callers wait no longer than their own timeout, on the loop's time, as on a socket."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        patience_s = request.extensions["timeout"]["read"]
        try:
            return await asyncio.wait_for(self._inner.handle_async_request(request), patience_s)
        except asyncio.TimeoutError:
            raise httpx.ReadTimeout("", request=request) from None
