"""A real edge agent and a real cloud tier with a core each, as far as the machine has them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import aiohttp

from benchmarks.live.client import Seen, Target
from examples.demo.stack import API_KEY, Stack, StackOptions, fastest_dtype

LOCAL_ONLY = {"x-overspill-locality": "local-only"}
_CLOUD_AUTH = {"authorization": f"Bearer {API_KEY}"}


@dataclass(frozen=True)
class TierOptions:
    """What may differ between two benchmarks.

    Attributes:
        edge_prefix, cloud_prefix: put before a command line, e.g. to run it in a network namespace.
        env: further variables of both.
    """

    edge_variants: tuple[str, ...] = ("smollm2-135m-int8", "smollm2-135m-pruned-int8")
    edge_prefix: tuple[str, ...] = ()
    cloud_prefix: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


class Tiers:
    """Use as `async with`: both tiers are up, and gone afterwards."""

    def __init__(self, folder: Path, options: TierOptions | None = None) -> None:
        self.options = options or TierOptions()
        self.dtype = fastest_dtype()
        self.stack = Stack(
            folder,
            StackOptions(
                tensor_parallel=1,
                dtype=self.dtype,
                broker=False,
                edge_variants=self.options.edge_variants,
                env={"OVERSPILL_EDGE__AGENT__LOG_LEVEL": "warning", **self.options.env},
            ),
        )
        self.cores = (core(0), core(1))
        self.stack.edge.argv = [*self.options.edge_prefix, *pinned(self.cores[0]), *self.stack.edge.argv]
        self.stack.cloud.argv = [*self.options.cloud_prefix, *pinned(self.cores[1]), *self.stack.cloud.argv]

    async def __aenter__(self) -> Tiers:
        await self.stack.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stack.__aexit__(kind, error, trace)

    @property
    def hybrid(self) -> Target:
        return Target("hybrid", self.stack.edge_url)

    @property
    def edge_only(self) -> Target:
        return Target("edge-only", self.stack.edge_url, headers=LOCAL_ONLY)

    @property
    def cloud_only(self) -> Target:
        return Target("cloud-only", self.stack.cloud_url, key=API_KEY)

    async def qualities(self) -> dict[str, float]:
        """Return the quality of every variant that the edge knows of."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.stack.edge_url}/v1/models") as reply:
            cards = [card["overspill"] for card in (await reply.json())["data"]]
        return {card["variant"]: card["quality"] for card in cards if card["kind"] == "variant"}

    async def cloud_tokens(self) -> int:
        """Return how many tokens the cloud tier has generated since it was started, those of cut answers too."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.stack.cloud_url}/metrics", headers=_CLOUD_AUTH) as reply,
        ):
            text = await reply.text()
        found = re.findall(r"^overspill_generated_tokens_total\{[^}]*\} ([0-9.e+]+)$", text, re.MULTILINE)
        return round(sum(map(float, found)))

    async def identify(self, seen: Sequence[Seen]) -> None:
        """Fill in who answered where the reply did not say, from the tiers' own decision records."""
        asked: tuple[tuple[str, dict[str, str]], ...] = (
            (f"{self.stack.edge_url}/v1/decisions", {}),
            (f"{self.stack.cloud_url}/v1/decisions", _CLOUD_AUTH),
        )
        async with aiohttp.ClientSession() as session:
            for one in seen:
                for url, headers in asked if one.first_s is not None and not one.variant else ():
                    async with session.get(f"{url}/{one.request_id}", headers=headers) as reply:
                        record = await reply.json() if reply.status == 200 else {}
                    chosen = record.get("chosen") or {}
                    if record.get("ttft_ms") is not None:
                        one.tier, one.variant = chosen.get("tier", ""), chosen.get("variant", "")

    async def settle(self, timeout_s: float = 20.0) -> None:
        """Wait until neither tier runs anything."""
        urls: tuple[tuple[str, dict[str, str]], ...] = (
            (f"{self.stack.edge_url}/metrics", {}),
            (f"{self.stack.cloud_url}/metrics", _CLOUD_AUTH),
        )
        async with aiohttp.ClientSession() as session:
            for _ in range(round(timeout_s / 0.25)):
                texts = [await _text(session, url, headers) for url, headers in urls]
                busy = re.findall(
                    r"^overspill_num_requests_(?:running|queued)\{?[^}\n]*\}? ([0-9.e+]+)$",
                    "\n".join(texts),
                    re.MULTILINE,
                )
                if not any(map(float, busy)):
                    return
                await asyncio.sleep(0.25)


async def _text(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> str:
    async with session.get(url, headers=headers) as reply:
        return await reply.text()


def core(index: int) -> int | None:
    """Return a core of this process by position, None where there are not so many or the system has no affinity."""
    if not hasattr(os, "sched_getaffinity") or shutil.which("taskset") is None:
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[index] if index < len(cores) and len(cores) > 1 else None


def pinned(core_index: int | None) -> list[str]:
    """Return the beginning of a command line that keeps to a core."""
    return [] if core_index is None else ["taskset", "-c", str(core_index)]
