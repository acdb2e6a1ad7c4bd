"""SmolLM2 INT8 as it is shipped: what it answers, alone and in company."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from edge_agent.config import LocalModels
from edge_agent.serving.lineup import Lineup
from edge_agent.serving.local_models import Shelf, local_models
from edge_agent.serving.replica import LocalReplica
from hardware_profiles.loader import load_profiles
from router.base.errors import ContextTooLong
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import ChatPrompt, Message, Prompt, TextPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

VARIANT = "smollm2-135m-int8"
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many days are in a week?",
    "Name a fruit that is yellow, and say in two sentences how it is eaten around the world.",
]
_numbers = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(models_root: Path) -> AsyncIterator[LocalReplica]:
    settings = LocalModels(store=str(models_root), variants=(VARIANT,), preload=(VARIANT,), intra_op_threads=1)
    profile, shelf = load_profiles()["generic-x86-cpu"], Shelf.open(settings)
    async with Lineup(lambda wanted: local_models(wanted, profile, shelf), lambda _: None) as lineup:
        await lineup.apply(settings)
        yield lineup.replicas[0]


def request(prompt: str | Prompt, continuation: str = "", **sampling: Any) -> InferenceRequest:
    chat = ChatPrompt((Message("user", prompt),)) if isinstance(prompt, str) else prompt
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 48} | sampling))
    return InferenceRequest(f"r{next(_numbers)}", VARIANT, chat, params, Objective(), 0, 0.0, continuation=continuation)


async def answer(replica: LocalReplica, wanted: InferenceRequest) -> tuple[str, TokenChunk]:
    text, last = "", TokenChunk("")
    async for last in replica.generate(wanted):
        text += last.text
    return text, last


async def test_it_knows_paris_and_counts_honestly(replica: LocalReplica) -> None:
    text, last = await answer(replica, request(QUESTIONS[0]))
    assert "Paris" in text
    assert last.finish_reason is FinishReason.STOP
    assert last.prompt_tokens == len(replica.codec.encode(ChatPrompt((Message("user", QUESTIONS[0]),))))


async def test_greedy_answers_in_a_batch_of_four_equal_those_alone(replica: LocalReplica) -> None:
    alone = [await answer(replica, request(question)) for question in QUESTIONS]
    together = await asyncio.gather(*(answer(replica, request(question)) for question in QUESTIONS))
    assert [text for text, _ in together] == [text for text, _ in alone]


async def test_seeds_repeat_in_any_company(replica: LocalReplica) -> None:
    drawn = request(QUESTIONS[1], temperature=0.8, top_p=0.95, seed=7)
    alone, _ = await answer(replica, drawn)
    crowd = [answer(replica, request(question, temperature=1.0, seed=1)) for question in QUESTIONS[2:]]
    (again, _), *_ = await asyncio.gather(answer(replica, drawn), *crowd)
    assert again == alone


async def test_a_continuation_goes_on_without_a_seam(replica: LocalReplica) -> None:
    """What another replica began is finished here as if it had been begun here."""
    whole, last = await answer(replica, request(QUESTIONS[3]))
    words = whole.split(" ")
    begun = " ".join(words[: len(words) // 2])
    rest, _ = await answer(replica, request(QUESTIONS[3], continuation=begun))
    # One that the cap has cut goes on for as many tokens again.
    assert (begun + rest)[: len(whole)] == whole if last.finish_reason is FinishReason.LENGTH else begun + rest == whole


async def test_stop_strings_and_caps_end_an_answer(replica: LocalReplica) -> None:
    text, last = await answer(replica, request(QUESTIONS[0], stop=("Paris",)))
    assert "Paris" not in text
    assert last.finish_reason is FinishReason.STOP
    text, last = await answer(replica, request(TextPrompt("The sea is"), max_tokens=5, ignore_eos=True))
    assert last.finish_reason is FinishReason.LENGTH
    assert text


async def test_a_cancelled_answer_frees_its_slot(replica: LocalReplica) -> None:
    stream = replica.generate(request(QUESTIONS[3], max_tokens=400, ignore_eos=True))
    await anext(stream)
    assert replica.snapshot().running == 1
    await stream.aclose()
    assert replica.snapshot().running == 0


async def test_a_prompt_beyond_the_window_is_refused(replica: LocalReplica) -> None:
    with pytest.raises(ContextTooLong, match="maximum context length is 2048 tokens"):
        await answer(replica, request("word " * 3000))
