"""Constrained answers and calls of tools by the INT8 model as it is shipped, cut anywhere and continued."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edge_agent.config import LocalModels
from edge_agent.serving.lineup import Lineup
from edge_agent.serving.local_models import Shelf, local_models
from edge_agent.serving.replica import LocalReplica
from hardware_profiles.loader import load_profiles
from router.base.errors import InvalidRequest
from router.values.call_reader import CallReader
from router.values.chunk import FinishReason
from router.values.constraint import Constraint, ConstraintKind
from router.values.prompt import ChatPrompt, Message
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.tool_calls import CallDelta, Tool, ToolChoice, Tools

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

VARIANT = "smollm2-135m-int8"
SCHEMA = (
    '{"type":"object","properties":{"city":{"type":"string","maxLength":12},"days":{"type":"integer","maximum":99}},'
    '"required":["city","days"],"additionalProperties":false}'
)
WEATHER = Tool("get_weather", "Forecast.", SCHEMA, strict=True)
CLOCK = Tool("get_time")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(models_root: Path) -> AsyncIterator[LocalReplica]:
    settings = LocalModels(store=str(models_root), variants=(VARIANT,), preload=(VARIANT,), intra_op_threads=1)
    profile, shelf = load_profiles()["generic-x86-cpu"], Shelf.open(settings)
    async with Lineup(lambda wanted: local_models(wanted, profile, shelf), lambda _: None) as lineup:
        await lineup.apply(settings)
        yield lineup.replicas[0]


async def answer(
    replica: LocalReplica, sampling: SamplingParams, tools: Tools | None = None, said: str = ""
) -> tuple[str, FinishReason | None]:
    text, reason = said, None
    prompt = ChatPrompt((Message("user", "What will the weather be in Paris?"),), tools)
    request = InferenceRequest("r", VARIANT, prompt, sampling, Objective(), 0, 0.0, continuation=said)
    async for chunk in replica.generate(request):
        text, reason = text + chunk.text, chunk.finish_reason
    return text, reason


def calls_in(text: str) -> list[tuple[str, dict[str, object]]]:
    reader, calls = CallReader(), []
    for piece in reader.feed(text) + reader.finish():
        if isinstance(piece, CallDelta):
            calls += [[piece.name, ""]] if piece.name else []
            calls[-1][1] += piece.arguments
    return [(name, json.loads(given)) for name, given in calls]


def fits(arguments: dict[str, object]) -> bool:
    return set(arguments) == {"city", "days"} and len(str(arguments["city"])) <= 12


async def test_json_by_a_schema_whole_and_from_any_cut(replica: LocalReplica) -> None:
    sampling = SamplingParams(
        temperature=0.8, seed=1, max_tokens=120, constraint=Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA)
    )
    whole, reason = await answer(replica, sampling)
    assert (fits(json.loads(whole)), reason) == (True, FinishReason.STOP)
    for cut in range(1, len(whole), 7):
        assert fits(json.loads((await answer(replica, sampling, said=whole[:cut]))[0])), whole[:cut]


async def test_a_cut_answer_says_so_and_a_hostile_one_is_refused(replica: LocalReplica) -> None:
    sampling = SamplingParams(max_tokens=3, constraint=Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA))
    assert (await answer(replica, sampling))[1] is FinishReason.LENGTH
    hostile = SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "(a|aa)*" * 500))
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        await answer(replica, hostile)


@pytest.mark.parametrize("choice", [ToolChoice.REQUIRED, ToolChoice.AUTO])
async def test_tools_are_called_by_their_schema_from_any_cut(replica: LocalReplica, choice: ToolChoice) -> None:
    tools = Tools((WEATHER, CLOCK), choice, parallel=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=120)
    begun = '<tool_call>\n{"name": "get_weather", "argu'
    whole, reason = await answer(replica, sampling, tools, begun)
    ((name, arguments),) = calls_in(whole)
    assert (name, fits(arguments), reason) == ("get_weather", True, FinishReason.STOP)
    for cut in range(1, len(whole), 11):
        joined, _ = await answer(replica, sampling, tools, whole[:cut])
        if choice is ToolChoice.REQUIRED or cut > len("<tool_call>"):
            assert fits(calls_in(joined)[0][1]) or calls_in(joined)[0][0] == "get_time", whole[:cut]
