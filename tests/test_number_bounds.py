"""Every number that a configuration may hold has an upper bound, and what is beyond it is refused by the key's name."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from cloud_tier.config import CloudConfig
from edge_agent.config import EdgeConfig
from hardware_profiles.loader import Profile
from models.pipelines.kinds.decode_image import DecodeImage
from router.base.config import decode
from router.base.errors import ConfigError
from router.tenants.tenant import Limits


def unbounded(kind: inspect.Type, at: str = "") -> Iterator[str]:
    """Yield the keys of numbers without an upper bound."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from unbounded(field.type, f"{at}.{field.encode_name}")
    elif isinstance(kind, (inspect.IntType, inspect.FloatType)):
        if kind.le is None and kind.lt is None:
            yield at[1:]
    else:
        for inner in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
            yield from unbounded(inner, at)
        for name in ("item_type", "value_type"):
            if hasattr(kind, name):
                yield from unbounded(getattr(kind, name), at)


@pytest.mark.parametrize("shape", [CloudConfig, EdgeConfig, Profile, Limits, DecodeImage])
def test_every_number_has_an_upper_bound(shape: type[msgspec.Struct]) -> None:
    assert list(unbounded(inspect.type_info(shape))) == []


@pytest.mark.parametrize("value", [10**30, 1e30, 10**18])
@pytest.mark.parametrize(
    ("shape", "key"),
    [
        (CloudConfig, "limits.max_body_bytes"),
        (CloudConfig, "limits.keep_alive_s"),
        (EdgeConfig, "models.unload_idle_s"),
        (EdgeConfig, "fleet.telemetry_interval_s"),
        (EdgeConfig, "fleet.outbox_max_rows"),
        (EdgeConfig, "router.max_queue"),
    ],
)
def test_a_number_beyond_its_bound_is_refused_by_its_key(shape: type, key: str, value: float) -> None:
    table, name = key.split(".")
    with pytest.raises(ConfigError, match=rf"there: `{key}` = .*(<= \d+|out of range|`int`, got `float`)"):
        decode({table: {name: value}}, shape, source="there")
