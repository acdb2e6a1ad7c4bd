"""The `[router]` table is strict, and its defaults are sound."""

from __future__ import annotations

import msgspec
import pytest

from router.base.config import decode
from router.base.errors import ConfigError
from router.policy.registry import POLICIES
from router.values.settings import (
    BreakerSettings,
    CanarySettings,
    DeploymentPattern,
    QualityProbe,
    RouterSettings,
)


def settings(**tree) -> RouterSettings:
    return decode(tree, RouterSettings, source="test")


def test_an_empty_table_is_the_defaults():
    assert settings() == RouterSettings()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_registered_policy_may_be_named(policy):
    assert settings(policy=policy).policy == policy


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"polciy": "local-only"}, "did you mean `policy`?"),
        ({"max_queue": 0}, "`max_queue` = 0"),
        ({"max_queue": 1.5}, "Expected `int`"),
        ({"ttft_slo_ms": -1.0}, "`ttft_slo_ms` = -1.0"),
        ({"ttft_slo_ms": float("nan")}, "finite"),
        ({"overload_enter": 0.1, "overload_leave": 0.2}, "overload must end below where it begins"),
        ({"device_first_quality_slack": 1.2}, "device_first_quality_slack"),
        ({"breaker": {"open_ms": 5000.0, "max_open_ms": 1000.0}}, "max_open_ms = 1000.0 is below open_ms"),
        ({"breaker": {"failures": "3"}}, "`breaker.failures` = '3'"),
        ({"breaker": {"opens_ms": 3.0}}, "did you mean `open_ms`?"),
        ({"credits": {"reserve": 0.6}}, "`credits.reserve` = 0.6"),
        ({"credits": {"lifetime_ms": 0}}, "`credits.lifetime_ms` = 0"),
        ({"credits": {"live_ms": 1.0}}, "did you mean `lifetime_ms`?"),
        ({"canary": [{"name": "next", "canary": {}}]}, "canary names no replica"),
        ({"canary": [{"name": "next", "canary": {"backend": "b"}, "weight": 1.5}]}, "weight"),
        ({"canary": [{"name": "next", "canary": {"backends": "b"}}]}, "did you mean `backend`?"),
        ({"canary": [{"name": "next", "canary": {"backend": "b"}}] * 2}, "names must be unique"),
        (
            {"canary": [{"name": "a", "canary": {"backend": "b"}, "probes": [{"prompt": "hi", "expect": "("}]}]},
            "no regular expression",
        ),
    ],
)
def test_what_is_wrong_is_named(tree, says):
    with pytest.raises(ConfigError) as caught:
        settings(**tree)
    assert says in caught.value.message


@pytest.mark.parametrize("shape", [RouterSettings, BreakerSettings, CanarySettings, DeploymentPattern, QualityProbe])
def test_every_key_is_documented(shape):
    for name in msgspec.structs.fields(shape):
        assert name.name in str(shape.__doc__), f"{shape.__name__}.{name.name}"
