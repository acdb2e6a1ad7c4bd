"""What is served → OpenAI's list of models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from router.values.replica import ReplicaInfo
from router.values.task import Task


def model_cards(replicas: Sequence[ReplicaInfo], created_s: int) -> list[dict[str, object]]:
    """Describe families, then variants, best rung first. One card a name: of two replicas the nearer one is shown.

    Models that generate come first: clients that are told no model, GuideLLM for one, take the first of the list.
    """
    generating = {info.family for info in replicas if Task.GENERATE in info.tasks}
    ordered = sorted(replicas, key=lambda r: (r.family not in generating, r.family, r.rung, r.remote))
    families: dict[str, list[ReplicaInfo]] = {}
    for info in ordered:
        families.setdefault(info.family, []).append(info)
    cards = [_card(name, created_s, _of_name(name, rungs)) for name, rungs in families.items()]
    seen = set(families)
    for info in ordered:
        if info.variant not in seen:
            seen.add(info.variant)
            cards.append(_card(info.variant, created_s, _variant(info)))
    return cards


def encode_models(cards: Iterable[dict[str, object]]) -> bytes:
    return msgspec.json.encode({"object": "list", "data": list(cards)})


def _card(name: str, created_s: int, overspill: dict[str, object]) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "overspill",
        "max_model_len": overspill["context_tokens"],
        "overspill": overspill,
    }


def _of_name(name: str, rungs: list[ReplicaInfo]) -> dict[str, object]:
    """Describe a family; one that is called as one of its variants is described as that too, for the tiers below."""
    called = [info for info in rungs if info.variant == name]
    return _family(rungs) | _variant(called[0]) if called else _family(rungs)


def _family(rungs: list[ReplicaInfo]) -> dict[str, object]:
    return {
        "kind": "family",
        "family": rungs[0].family,
        "variants": list(dict.fromkeys(info.variant for info in rungs)),
        "quality": max(info.quality for info in rungs),
        "context_tokens": max(info.context_tokens for info in rungs),
        "tasks": _tasks(rungs),
        "offers": _offers(rungs),
    }


def _variant(info: ReplicaInfo) -> dict[str, object]:
    return {
        "kind": "variant",
        "family": info.family,
        "variant": info.variant,
        "rung": info.rung,
        "quality": info.quality,
        "context_tokens": info.context_tokens,
        "tasks": _tasks([info]),
        "offers": _offers([info]),
        **({} if info.signature is None else {"signature": info.signature}),
        "tier": info.tier,
        "remote": info.remote,
        "device": info.device_key,
        "prior": {
            "prefill_tokens_per_s": info.prior.prefill_tokens_per_s,
            "decode_tokens_per_s": info.prior.decode_tokens_per_s,
            "decode_batch_slope": info.prior.decode_batch_slope,
            "source": info.prior.source,
        },
    }


def _tasks(rungs: list[ReplicaInfo]) -> list[str]:
    return sorted({task.value for info in rungs for task in info.tasks})


def _offers(rungs: list[ReplicaInfo]) -> list[str]:
    return sorted({feature.value for info in rungs for feature in info.offers})
