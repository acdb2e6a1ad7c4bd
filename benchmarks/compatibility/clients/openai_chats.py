"""OpenAI's SDK for Python: models, chats and completions."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from checking import Pieces, Server
from openai_sdk import ASK, checks, sdk


@checks.that("models: list")
def models(server: Server) -> None:
    with sdk(server) as client:
        assert server.model in [card.id for card in client.models.list()]


@checks.that("models: retrieve one")
def one_model(server: Server) -> None:
    with sdk(server) as client:
        assert client.models.retrieve(server.model).id == server.model


@checks.that("chat")
def chat(server: Server) -> None:
    with sdk(server) as client:
        reply = client.chat.completions.create(
            model=server.model,
            messages=[{"role": "system", "content": "You answer in one word."}, *ASK],
            max_completion_tokens=12,
            temperature=0,
        )
        choice = reply.choices[0]
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason in {"stop", "length"}
        assert reply.usage is not None
        assert 1 <= reply.usage.completion_tokens <= 12
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        assert reply.object == "chat.completion"


@checks.that("chat: content in parts")
def content_parts(server: Server) -> None:
    with sdk(server) as client:
        reply = client.chat.completions.create(
            model=server.model,
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]}
            ],
            max_tokens=8,
            user="someone",
        )
        assert reply.choices[0].message.content


@checks.that("chat: the same seed, the same answer; stop strings; a cut answer says so")
def seed_and_stop(server: Server) -> None:
    with sdk(server) as client:

        def answer(**options: Any) -> Any:
            told = {"model": server.model, "messages": ASK, "max_tokens": 16, "seed": 7, "temperature": 1.2, **options}
            return client.chat.completions.create(**told).choices[0]

        first, second, other = answer(), answer(), answer(seed=8)
        assert first.message.content == second.message.content
        assert first.message.content != other.message.content
        assert answer(max_tokens=3).finish_reason == "length"
        words = first.message.content.split()
        stopped = answer(stop=[words[3]])
        assert words[3] not in stopped.message.content
        assert stopped.finish_reason == "stop"


@checks.that("chat stream: pieces over time, usage at the end")
def stream(server: Server) -> None:
    pieces, usage, finished = Pieces(), None, None
    with sdk(server) as client:
        for chunk in client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Tell a story of the sea."}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces.add(choice.delta.content)
                finished = choice.finish_reason or finished
    pieces.came_over_time()
    assert finished == "length"
    assert usage is not None
    assert usage.completion_tokens == 24


@checks.that("chat stream: left in the middle, and the next request is served")
def leave(server: Server) -> None:
    with sdk(server) as client:
        told = client.chat.completions.create(model=server.model, messages=ASK, max_tokens=400, stream=True)
        next(iter(told))
        told.close()
        reply = client.chat.completions.create(model=server.model, messages=ASK, max_tokens=4)
        assert reply.choices[0].message.content


@checks.that("async client: eight chats at once")
async def eight(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.openai_url, api_key=server.key, max_retries=2) as client:
        replies = await asyncio.gather(
            *(client.chat.completions.create(model=server.model, messages=ASK, max_tokens=8) for _ in range(8))
        )
        assert all(reply.choices[0].message.content for reply in replies)
        assert len({reply.id for reply in replies}) == 8


@checks.that("completions")
def completions(server: Server) -> None:
    with sdk(server) as client:
        reply = client.completions.create(
            model=server.model, prompt="The capital of France is", max_tokens=6, temperature=0
        )
        assert "Paris" in reply.choices[0].text
        assert reply.usage is not None
        assert reply.usage.prompt_tokens in {5, 6}  # with the beginning of text, or without


@checks.that("completions stream")
def completions_stream(server: Server) -> None:
    pieces = Pieces()
    with sdk(server) as client:
        for chunk in client.completions.create(
            model=server.model, prompt="Once upon a time", max_tokens=20, temperature=0, stream=True
        ):
            pieces.add(chunk.choices[0].text if chunk.choices else "")
    pieces.came_over_time()


@checks.that("completions: a list of prompts")
def prompt_list(server: Server) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    with sdk(server) as client:
        reply = client.completions.create(model=server.model, prompt=prompts, max_tokens=6, temperature=0)
        texts = {choice.index: choice.text for choice in reply.choices}
        assert "Paris" in texts[0]
        assert "Rome" in texts[1]


@checks.that("completions: prompts of token ids")
def token_ids(server: Server) -> None:
    ids = [504, 3575, 282, 4649, 314]  # The capital of France is
    with sdk(server) as client:
        reply = client.completions.create(model=server.model, prompt=ids, max_tokens=6, temperature=0)
        assert "Paris" in reply.choices[0].text, reply.choices[0].text
        both = client.completions.create(model=server.model, prompt=[ids, ids], max_tokens=6, temperature=0)
        assert [choice.text for choice in both.choices] == [reply.choices[0].text] * 2


@checks.that("completions: echo")
def echo(server: Server) -> None:
    with sdk(server) as client:
        reply = client.completions.create(
            model=server.model, prompt="The capital of France is", max_tokens=6, temperature=0, echo=True
        )
        assert reply.choices[0].text.startswith("The capital of France is")
        assert "Paris" in reply.choices[0].text


@checks.that("completions: logprobs, of an echoed prompt too")
def completion_logprobs(server: Server) -> None:
    with sdk(server) as client:
        reply = client.completions.create(
            model=server.model, prompt="The capital of France is", max_tokens=2, temperature=0, echo=True, logprobs=2
        )
        told = reply.choices[0].logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.token_logprobs is not None
        assert told.text_offset is not None
        # A token that begins every text of a model stands first here, and not in the text.
        begun = told.tokens[0].startswith("<|")
        assert "".join(told.tokens[begun:]) == reply.choices[0].text
        assert len(told.tokens) == len(told.token_logprobs) == 7 + begun
        assert told.token_logprobs[0] is None
        assert all(value is not None and value <= 0 for value in told.token_logprobs[1:])
        assert told.text_offset[begun : begun + 2] == [0, 3]


@checks.that("chat: logprobs")
def chat_logprobs(server: Server) -> None:
    with sdk(server) as client:
        reply = client.chat.completions.create(
            model=server.model, messages=ASK, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
        )
        told = reply.choices[0].logprobs
        assert told is not None
        assert told.content
        assert "".join(item.token for item in told.content) == reply.choices[0].message.content
        for item in told.content:
            assert len(item.top_logprobs) == 3
            best = max(item.top_logprobs, key=lambda other: other.logprob)
            assert best.token == item.token
            assert bytes(item.bytes or []).decode(errors="replace") == item.token


@checks.that("chat stream: logprobs")
def stream_logprobs(server: Server) -> None:
    text, tokens = "", ""
    with sdk(server) as client:
        for chunk in client.chat.completions.create(
            model=server.model, messages=ASK, max_tokens=6, temperature=0, logprobs=True, stream=True
        ):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                tokens += "".join(item.token for item in (choice.logprobs and choice.logprobs.content) or ())
    assert text
    assert tokens == text


@checks.that("chat: n = 3")
def several(server: Server) -> None:
    with sdk(server) as client:
        reply = client.chat.completions.create(
            model=server.model, messages=ASK, max_tokens=10, n=3, temperature=1.3, seed=1
        )
        assert sorted(choice.index for choice in reply.choices) == [0, 1, 2]
        assert len({choice.message.content for choice in reply.choices}) > 1


@checks.that("chat stream: n = 2")
def several_streamed(server: Server) -> None:
    texts: dict[int, str] = {}
    with sdk(server) as client:
        for chunk in client.chat.completions.create(
            model=server.model, messages=ASK, max_tokens=8, n=2, temperature=1.3, stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert set(texts) == {0, 1}
    assert all(texts.values())


@checks.that("chat: logit_bias")
def logit_bias(server: Server) -> None:
    with sdk(server) as client:
        reply = client.completions.create(
            model=server.model,
            prompt="The capital of France is",
            max_tokens=3,
            temperature=0,
            logit_bias={"7042": -100},
        )
        forced = client.completions.create(
            model=server.model, prompt="The capital of France is", max_tokens=3, temperature=0, logit_bias={"4649": 100}
        )
        assert "Paris" not in reply.choices[0].text
        assert forced.choices[0].text == " France France France", forced.choices[0].text


@checks.that("chat: sampling beyond OpenAI's (top_k, min_p, repetition_penalty, min_tokens, stop_token_ids)")
def extra_sampling(server: Server) -> None:
    with sdk(server) as client:
        extra = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 6, "stop_token_ids": [28]}
        reply = client.chat.completions.create(
            model=server.model, messages=ASK, max_tokens=10, temperature=0.9, extra_body=extra
        )
        assert reply.usage is not None
        assert reply.usage.completion_tokens >= 6
