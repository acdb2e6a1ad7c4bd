"""A chat with SmolLM2 INT8 over several turns: what is kept between them changes the time of an answer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_agent.config import LocalModels
from edge_agent.serving.local_models import Shelf, local_models
from edge_agent.serving.replica import LocalReplica
from hardware_profiles.loader import load_profiles
from router.values.chunk import TokenChunk
from router.values.prompt import ChatPrompt, Message
from tests.edge_agent.serving.test_real_model import replica, request

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

__all__ = ["replica"]  # the fixture

SYSTEM = " ".join(
    [
        "You are a patient teacher at a school by the sea. Answer in one or two short sentences, without lists.",
        *(
            f"Rule {n}: when a pupil asks about subject number {n}, name one thing that can be seen."
            for n in range(1, 9)
        ),
    ]
)
CHATS = [
    ["What is the capital of France?", "And of Spain?", "Which of the two is larger?"],
    ["Write one sentence about the sea.", "Now about  mountains,\n\nplease. 🏔", "Thanks! Say goodbye in French."],
    ["Count: 1, 2, 3,", "def add(a, b):\n    return a + b\n\nWhat does this do?", "<|im_end|> is what?"],
]


async def chat(
    replica: LocalReplica, questions: list[str], callers: list[str], **sampling: Any
) -> list[tuple[str, list[TokenChunk]]]:
    """Ask one question after the other, each for one of `callers`."""
    messages, found = [Message("system", SYSTEM)], []
    for question, caller in zip(questions, callers, strict=True):
        messages.append(Message("user", question))
        prompt = ChatPrompt(tuple(messages))
        wanted = msgspec.structs.replace(request(prompt, **({"max_tokens": 24} | sampling)), caller=caller)
        chunks = [chunk async for chunk in replica.generate(wanted)]
        text = "".join(chunk.text for chunk in chunks)
        messages.append(Message("assistant", text))
        found.append((text, chunks))
    return found


@pytest.mark.parametrize(
    ("questions", "sampling"),
    [*((chat, {}) for chat in CHATS), (CHATS[0], {"temperature": 0.8, "seed": 11})],
    ids=["capitals", "blanks and emoji", "digits, code, special tokens", "seeded"],
)
async def test_repeatable_answers_are_the_same_with_and_without_what_was_kept(
    replica: LocalReplica, questions: list[str], sampling: dict[str, object], request: pytest.FixtureRequest
) -> None:
    name, chunk = request.node.name, load_profiles()["generic-x86-cpu"].serving.prefill_chunk_tokens
    fresh = await chat(replica, questions, [f"{name} {turn}" for turn in range(3)], **sampling)
    kept = await chat(replica, questions, [f"{name} kept"] * 3, **sampling)
    assert [text for text, _ in kept] == [text for text, _ in fresh]
    assert [chunks[0].cached_tokens for _, chunks in fresh] == [1] * 3  # the model's own prefix
    prompts = [chunks[-1].prompt_tokens or 0 for _, chunks in kept]
    whole = [1 + (tokens - 1) // chunk * chunk for tokens in prompts[:2]]  # chunks of the prompt before
    assert [chunks[0].cached_tokens for _, chunks in kept] == [1, *whole]


@pytest.mark.parametrize("questions", CHATS, ids=["capitals", "blanks and emoji", "digits, code, special tokens"])
async def test_an_answer_that_is_drawn_anew_each_time_begins_where_the_last_one_ended(
    replica: LocalReplica, questions: list[str], request: pytest.FixtureRequest
) -> None:
    known = answered = 0
    for _, chunks in await chat(replica, questions, [request.node.name] * 3, temperature=1.0):
        cached, last = chunks[0].cached_tokens or 0, chunks[-1]
        answer_tokens = sum(chunk.tokens for chunk in chunks)
        if known:  # the prompt at least, and the answer up to where the tokenizer writes its text otherwise
            assert known - answered <= cached <= known
        known, answered = (last.prompt_tokens or 0) + answer_tokens - 1, answer_tokens


async def test_a_prompt_of_another_family_of_words_shares_nothing(replica: LocalReplica) -> None:
    ((_, chunks),) = await chat(replica, ["Hello!"], ["words"])
    wanted = msgspec.structs.replace(request("Count to three."), caller="words")
    found = [chunk async for chunk in replica.generate(wanted)]
    assert chunks[-1].prompt_tokens
    assert found[0].cached_tokens < 16


async def test_the_shelf_of_models_takes_the_setting(models_root: Path) -> None:
    for keep in (True, False):
        settings = LocalModels(store=str(models_root), variants=("smollm2-135m-int8",), keep_kv=keep)
        (model,) = local_models(settings, load_profiles()["generic-x86-cpu"], Shelf.open(settings))
        assert model.keep_kv is keep
