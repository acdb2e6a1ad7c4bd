"""Policies by name: an unknown one is refused wherever a policy is loaded or configured."""

from __future__ import annotations

from pathlib import Path

import pytest

import cloud_tier.config
import edge_agent.config
from router.base.errors import ConfigError
from router.policy.registry import POLICIES, load_policy
from router.values.request import Locality


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_of_the_registry_loads(name: str) -> None:
    assert isinstance(load_policy(name).locality, Locality)


def test_an_unknown_policy_is_refused_by_either_tier(tmp_path: Path) -> None:
    path = tmp_path / "tier.toml"
    path.write_text('[router]\npolicy = "best"\n')
    for load in (
        lambda: load_policy("best"),
        lambda: edge_agent.config.load_config(path),
        lambda: cloud_tier.config.load(path),
    ):
        with pytest.raises(ConfigError, match="quality-in-objective") as caught:
            load()
        assert caught.value.param == "router.policy"
