"""What an upstream says it serves (`GET /v1/models`), into descriptions of replicas, within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from router.base.json_input import UNREADABLE
from router.values.feature import OFFERED, Feature
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.task import GENERATES, Task
from router.values.tensors import Signature

_Speed = Annotated[float, msgspec.Meta(ge=1e-3, le=1e9)]
# Names end in our own reply headers, logs and metrics.
_Name = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[ -~]*$")]


class _Prior(msgspec.Struct):
    """Within bounds that no arithmetic of predictions can leave the numbers by."""

    prefill_tokens_per_s: _Speed
    decode_tokens_per_s: _Speed
    decode_batch_slope: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.2
    source: Annotated[str, msgspec.Meta(max_length=256)] = "upstream"


class _Rung(msgspec.Struct):
    kind: str
    family: _Name
    variant: _Name = ""
    rung: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    quality: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    context_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 1
    tier: _Name = "cloud"
    device: _Name = ""
    tasks: tuple[str, ...] = ("generate",)
    offers: tuple[str, ...] = ()
    prior: _Prior | None = None
    signature: Signature | None = None


class _Card(msgspec.Struct):
    overspill: _Rung | None = None


class _Cards(msgspec.Struct):
    data: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=1000)]


_OFFERED_BY_TIERS = frozenset({Feature.TOKENIZE})
"""A tier has the tokenizers of its own models, and passes on what is for others."""

_cards_decoder = msgspec.json.Decoder(_Cards)
_card_decoder = msgspec.json.Decoder(_Card)


@dataclass(frozen=True, slots=True)
class Rungs:
    """What an upstream serves.

    Attributes:
        infos: no two of one id.
        unreadable: why a card was left out, the last if several were; empty if none was.
    """

    infos: list[ReplicaInfo]
    unreadable: str


def read_rungs(body: bytes, endpoint: str) -> Rungs:
    """Read a list of model cards; a card that cannot be read is left out, and the others serve.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is no such list.
    """
    infos: dict[str, ReplicaInfo] = {}
    unreadable = ""
    for raw in _cards_decoder.decode(body).data:
        try:
            rung = _card_decoder.decode(raw).overspill
        except UNREADABLE as error:
            unreadable = str(error)
            continue
        info = None if rung is None else _info(rung, endpoint)
        if info is not None:
            infos[info.replica_id] = info
    return Rungs(list(infos.values()), unreadable)


def _info(rung: _Rung, endpoint: str) -> ReplicaInfo | None:
    tasks = frozenset(task for task in Task if task.value in rung.tasks)
    if rung.kind != "variant" or not rung.variant or rung.prior is None or not tasks:
        return None
    if Task.INFER in tasks and rung.signature is None:
        return None
    return ReplicaInfo(
        replica_id=f"{rung.tier}/{rung.variant}",
        endpoint=endpoint,
        tier=rung.tier,
        remote=True,
        family=rung.family,
        variant=rung.variant,
        rung=rung.rung,
        quality=rung.quality,
        context_tokens=rung.context_tokens,
        tasks=GENERATES if tasks == GENERATES else tasks,
        offers=frozenset(feature for feature in OFFERED if feature.value in rung.offers) | _OFFERED_BY_TIERS,
        signature=rung.signature,
        device=f"{endpoint} {rung.device or rung.variant}",  # a tier that tells of no devices: one for each rung
        prior=SpeedPrior(
            prefill_tokens_per_s=rung.prior.prefill_tokens_per_s,
            decode_tokens_per_s=rung.prior.decode_tokens_per_s,
            decode_batch_slope=rung.prior.decode_batch_slope,
            source=rung.prior.source,
        ),
    )
