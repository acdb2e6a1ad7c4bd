"""Which GPUs this machine has, and which engine gets which of them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from router.base.errors import ConfigError
from router.base.json_input import UNREADABLE

log = structlog.get_logger("cloud_tier")

GPU_WORKING_BYTES = 1 << 30
"""What a rank takes beside weights and KV cache: CUDA's context and libraries, activations, logits."""

_GPU_NODES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg")
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([(torch.cuda.get_device_name(n), torch.cuda.mem_get_info(n)[0]) for n in range(count)]))
"""
_ASK_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch can use.

    Attributes:
        id: as CUDA_VISIBLE_DEVICES names it.
        free_bytes: of its memory, before any engine has started.
    """

    id: str
    name: str
    free_bytes: int


class GpuFinder(Protocol):
    """See `find_gpus`."""

    def __call__(self, *, expected: bool) -> tuple[Gpu, ...]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What one engine wants.

    Attributes:
        label: what the configuration calls it.
        ranks: how many GPUs; 0 for an engine on the CPU.
        bytes_a_rank: estimate of the memory that each of them gives.
        gpus: those that the configuration names; empty leaves the choice to `assign_gpus`.
    """

    label: str
    ranks: int
    bytes_a_rank: int
    gpus: tuple[str, ...] = ()


def find_gpus(*, expected: bool) -> tuple[Gpu, ...]:
    """Return the GPUs that torch can use here: it is asked in a process of its own.

    Args:
        expected: ask it even where the system shows none.
    """
    if not expected and not any(Path(node).exists() for node in _GPU_NODES):
        return ()
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], check=True, timeout=_ASK_TIMEOUT_S, stdout=subprocess.PIPE, text=True
        )
        found = msgspec.json.decode(asked.stdout, type=list[tuple[str, int]])
    except (subprocess.SubprocessError, *UNREADABLE):
        found = []
    if not found:
        log.warning("torch can use no GPU of this machine; its wheel must be one for CUDA, and fit the driver")
    # Engines are told by CUDA_VISIBLE_DEVICES, whose numbers count all GPUs and not those that it shows here.
    shown = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    ids = shown if len(shown) >= len(found) else [str(number) for number in range(len(found))]
    return tuple(Gpu(number, name, free) for number, (name, free) in zip(ids, found, strict=False))


def assign_gpus(wanted: Sequence[Wanted], gpus: Sequence[Gpu]) -> list[tuple[str, ...]]:
    """Give every engine its GPUs, in the order of `wanted`.

    Those that the configuration names are set aside first. Of the other engines the largest chooses first: GPUs that
    no engine has yet, and of these the ones with most free memory; when all are taken, engines share what has room.

    Raises:
        ConfigError: an engine fits on no GPUs that are left; names what is free and the remedy.
    """
    free_bytes = {gpu.id: gpu.free_bytes for gpu in gpus}
    taken: set[str] = set()
    placed: dict[int, tuple[str, ...]] = {}
    order = sorted(range(len(wanted)), key=lambda n: (not wanted[n].gpus, -wanted[n].ranks * wanted[n].bytes_a_rank, n))
    for number in order:
        want = wanted[number]
        if want.gpus or not want.ranks:
            chosen = want.gpus
            fits = all(free_bytes.get(one, want.bytes_a_rank) >= want.bytes_a_rank for one in chosen)
        else:
            room = [one for one, free in free_bytes.items() if free >= want.bytes_a_rank]
            room.sort(key=lambda one: (one in taken, -free_bytes[one]))
            chosen = tuple(room[: want.ranks])
            fits = len(chosen) == want.ranks
        if not fits:
            raise _no_room(want, gpus, free_bytes)
        shared = [one for one in chosen if one in taken]
        if shared:
            log.warning("engines share a GPU", model=want.label, gpus=shared)
        for one in chosen:
            taken.add(one)
            if one in free_bytes:  # a name that torch does not list (a UUID) is left to the ranks
                free_bytes[one] -= want.bytes_a_rank
        placed[number] = chosen
    return [placed[number] for number in range(len(wanted))]


def spare_bytes(wanted: Sequence[Wanted], placed: Sequence[tuple[str, ...]], gpus: Sequence[Gpu]) -> list[int]:
    """Return what each engine may take on every GPU of its own beside what it wanted: an equal part of what is left.

    0 for an engine on the CPU, or on a GPU whose memory is not known.
    """
    left = {gpu.id: gpu.free_bytes for gpu in gpus}
    engines = Counter(one for chosen in placed for one in chosen)
    for want, chosen in zip(wanted, placed, strict=True):
        for one in chosen:
            left[one] = left.get(one, 0) - want.bytes_a_rank
    return [min((max(0, left[one]) // engines[one] for one in chosen), default=0) for chosen in placed]


def _no_room(want: Wanted, gpus: Sequence[Gpu], free_bytes: dict[str, int]) -> ConfigError:
    left = ", ".join(f"GPU {gpu.id} ({gpu.name}) {max(0, free_bytes[gpu.id]) / 2**30:.1f} GiB" for gpu in gpus)
    named = f" and `gpus` names {', '.join(want.gpus)}" if want.gpus else ""
    return ConfigError(
        f"{want.label} needs about {want.bytes_a_rank / 2**30:.1f} GiB on each of {want.ranks} "
        f"GPU{'s' if want.ranks > 1 else ''}{named}; left beside the other engines: {left}. Lower its kv_cache_tokens, "
        "raise tensor_parallel, serve fewer models here, or set device = 'cpu'",
        param="models.gpus",
    )
