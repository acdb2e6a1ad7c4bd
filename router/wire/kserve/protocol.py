"""The parameters of the protocol itself, which clients send to models of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from router.base.errors import InvalidRequest

Fields = TypeVar("Fields", bound="ProtocolFields")

_REMEDIES = {
    "priority": "send the header `x-overspill-priority` (higher is better) instead",
    "sequence_id": "models keep no state between requests: send all that one needs",
}


class ProtocolFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may stand in `parameters` whatever the model does; `timeout` counts microseconds."""

    timeout: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    binary_data_output: bool = False
    priority: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    triton_enable_empty_final_response: bool = False

    @property
    def timeout_s(self) -> float | None:
        return None if self.timeout is None else self.timeout / 1e6

    def refuse_unserved(self) -> None:
        """Check that nothing is asked that no model here keeps to.

        Raises:
            InvalidRequest: naming the parameter.
        """
        for name, refused in (("priority", self.priority), ("sequence_id", self.sequence_id)):
            if refused:
                raise InvalidRequest(f"`parameters.{name}`: {_REMEDIES[name]}", param=f"parameters.{name}")


def read_fields(given: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """Read all of `parameters`.

    Raises:
        InvalidRequest: one is unknown, wrong or not served.
    """
    try:
        found = msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`parameters`: {error}", param="parameters") from None
    found.refuse_unserved()
    return found
