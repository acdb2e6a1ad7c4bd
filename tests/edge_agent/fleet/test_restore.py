"""Each stored override on its own: those that can be in force are, whatever they depend on and in any order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edge_agent.fleet.restore import restore_each
from router.base.errors import ConfigError
from router.fleetwire.overrides import lay_over, leaves

KEYS = ("policy", "a", "b", "c")
needs = st.dictionaries(st.sampled_from(KEYS[1:]), st.sampled_from(KEYS))


def tree(router: Mapping[str, Any], models: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(table) for name, table in (("router", router), ("models", models)) if table}


tables = st.dictionaries(
    st.sampled_from(KEYS), st.integers(0, 3) | st.dictionaries(st.sampled_from("xy"), st.integers())
)


@given(st.builds(tree, tables, tables), needs, st.sets(st.sampled_from(KEYS)))
async def test_what_can_be_in_force_is_and_the_rest_is_named(
    overrides: dict[str, Any], needed: dict[str, str], bad: set[str]
) -> None:
    """A key of `bad` never applies, one of `needed` only beside another one of its table."""
    wanted = dict(leaves(overrides))

    async def attempt(tried: Mapping[str, Any]) -> ConfigError | None:
        names = {tuple(key.split(".")[:2]) for key, _ in leaves(tried)}
        wrong = [key for table, key in names if key in bad or (table, needed.get(key, key)) not in names]
        return ConfigError(f"not {', '.join(sorted(wrong))}") if wrong else None

    restored = await restore_each(overrides, attempt, {})
    kept = dict(leaves(restored.overrides))
    assert kept.items() <= wanted.items()
    assert set(kept) | set(restored.failed) == set(wanted)
    assert not set(kept) & set(restored.failed)
    assert await attempt(restored.overrides) is None
    for key in restored.failed:
        table, name = key.split(".")[:2]
        alone = {table: {name: overrides[table][name]}}
        assert await attempt(lay_over(restored.overrides, alone)) is not None


async def test_a_skipped_table_is_left_out_and_said_to_be() -> None:
    async def attempt(_: Mapping[str, Any]) -> ConfigError | None:
        return None

    overrides = {"models": {"kv_slots": 2}, "router": {"max_queue": 9, "policy": "local-only"}}
    restored = await restore_each(overrides, attempt, {"models": ConfigError("ended five times")})
    assert restored.overrides == {"router": {"policy": "local-only", "max_queue": 9}}
    assert list(restored.failed) == ["models.kv_slots"]
    assert "ended five times" in restored.reason
