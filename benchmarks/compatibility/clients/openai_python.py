"""OpenAI's SDK for Python."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any, Literal

import openai
import pydantic
from checking import Checks, NotRunError, Pieces, Server, refused

checks = Checks(("openai",))

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "celsius": {"type": "boolean"}},
            "required": ["city", "celsius"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="


class Person(pydantic.BaseModel):
    """What structured answers are parsed into."""

    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=10, le=99)


def sdk(server: Server, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        **{"base_url": server.openai_url, "api_key": server.key, "max_retries": 0, "timeout": 80, **options}
    )


def embedder(server: Server) -> openai.OpenAI:
    server.wants_embeddings()
    return sdk(server, base_url=f"{server.embeddings_url}/v1")


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


@checks.that("response_format: json_object")
def json_object(server: Server) -> None:
    with sdk(server) as client:
        reply = client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": 'Answer with JSON like {"city": "Paris"}. A city?'}],
            response_format={"type": "json_object"},
            max_tokens=160,
            temperature=0,
        )
        told = reply.choices[0]
        if told.finish_reason == "length":  # a weak model may go on for ever, but only with an object
            assert (told.message.content or "").lstrip().startswith("{")
        else:
            assert isinstance(json.loads(told.message.content or ""), dict)


@checks.that("response_format: json_schema by parse()")
def parse(server: Server) -> None:
    with sdk(server) as client:
        reply = client.chat.completions.parse(
            model=server.model,
            messages=[{"role": "user", "content": "Invent a person."}],
            response_format=Person,
            max_tokens=80,
            temperature=0.7,
            seed=3,
        )
        told = reply.choices[0].message.parsed
        assert isinstance(told, Person)
        assert 10 <= told.age <= 99


@checks.that("response_format: json_schema, streamed")
def parse_stream(server: Server) -> None:
    with (
        sdk(server) as client,
        client.chat.completions.stream(
            model=server.model,
            messages=[{"role": "user", "content": "Invent a person."}],
            response_format=Person,
            max_tokens=80,
            temperature=0.7,
            seed=3,
        ) as told,
    ):
        kinds = [event.type for event in told]
        parsed = told.get_final_completion().choices[0].message.parsed
    assert kinds.count("content.delta") >= 4
    assert isinstance(parsed, Person)


@checks.that("tools: call by name, result sent back, answer")
def tools(server: Server) -> None:
    with sdk(server) as client:
        first = client.chat.completions.create(
            model=server.model, messages=ASK, tools=[WEATHER], tool_choice=NAMED, max_tokens=60, temperature=0
        )
        (call,) = first.choices[0].message.tool_calls or ()
        told = json.loads(call.function.arguments)
        assert call.function.name == "get_weather"
        assert told["city"] in {"Paris", "Rome"}
        assert isinstance(told["celsius"], bool)
        assert call.id
        history = [
            *ASK,
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear", "degrees": 21}'},
        ]
        second = client.chat.completions.create(
            model=server.model, messages=history, tools=[WEATHER], tool_choice="none", max_tokens=16
        )
        assert second.choices[0].message.content
        assert not second.choices[0].message.tool_calls


@checks.that("tools: required")
def tools_required(server: Server) -> None:
    with sdk(server) as client:
        told = client.chat.completions.create(
            model=server.model, messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=120, temperature=0
        ).choices[0]
        assert told.finish_reason == "tool_calls"
        calls = told.message.tool_calls or []
        assert calls
        for call in calls:
            assert set(json.loads(call.function.arguments)) == {"city", "celsius"}


@checks.that("tools: auto, where the model may answer in words")
def tools_auto(server: Server) -> None:
    with sdk(server) as client:
        told = client.chat.completions.create(
            model=server.model, messages=ASK, tools=[WEATHER], max_tokens=40, temperature=0
        ).choices[0]
        assert told.message.content or told.message.tool_calls
        assert (told.finish_reason == "tool_calls") == bool(told.message.tool_calls)


@checks.that("tools: streamed in pieces")
def tools_stream(server: Server) -> None:
    arguments, names, finished = Pieces(), [], None
    with sdk(server) as client:
        for chunk in client.chat.completions.create(
            model=server.model,
            messages=ASK,
            tools=[WEATHER],
            tool_choice=NAMED,
            max_tokens=90,
            temperature=0,
            stream=True,
        ):
            for choice in chunk.choices:
                finished = choice.finish_reason or finished
                for call in choice.delta.tool_calls or ():
                    assert call.index == 0
                    names += [call.function.name] if call.function and call.function.name else []
                    arguments.add(call.function.arguments if call.function else None)
    assert names == ["get_weather"]
    assert set(json.loads(arguments.text)) == {"city", "celsius"}
    assert finished in {"tool_calls", "stop"}
    assert len(arguments.texts) >= 3, arguments.texts


@checks.that("embeddings: vectors of two texts, near and far")
def embeddings(server: Server) -> None:
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose again."]
    with embedder(server) as client:
        reply = client.embeddings.create(model=server.embeddings_model, input=texts)
        vectors = [item.embedding for item in reply.data]
        assert [item.index for item in reply.data] == [0, 1, 2]
        assert len({len(vector) for vector in vectors}) == 1
        assert reply.usage.prompt_tokens > 10

        def alike(a: list[float], b: list[float]) -> float:
            lengths = sum(x * x for x in a) ** 0.5 * sum(x * x for x in b) ** 0.5
            return sum(x * y for x, y in zip(a, b, strict=True)) / lengths

        assert alike(vectors[0], vectors[1]) > 0.1 + alike(vectors[0], vectors[2])
        plain = client.embeddings.create(model=server.embeddings_model, input=texts[0], encoding_format="float")
        assert alike(plain.data[0].embedding, vectors[0]) > 0.999


@checks.that("embeddings: base64 as numbers of four bytes, token ids")
def embeddings_base64(server: Server) -> None:
    with embedder(server) as client:
        raw = client.embeddings.with_raw_response.create(
            model=server.embeddings_model, input="A cat sits on the mat.", encoding_format="base64"
        )
        body = json.loads(raw.text)
        assert len(base64.b64decode(body["data"][0]["embedding"])) == 4 * 384
        ids = client.embeddings.create(model=server.embeddings_model, input=[[101, 1037, 4937, 102]])
        assert len(ids.data[0].embedding) == 384


@checks.that("responses: create, with instructions, and its fields")
def responses(server: Server) -> None:
    with sdk(server) as client:
        reply = client.responses.create(
            model=server.model, instructions="You are brief.", input="Say hello.", max_output_tokens=16, temperature=0
        )
        assert reply.output_text
        assert reply.status in {"completed", "incomplete"}
        assert reply.output[0].type == "message"
        assert reply.usage is not None
        assert reply.usage.output_tokens <= 16


@checks.that("responses: stream of events")
def responses_stream(server: Server) -> None:
    pieces, kinds = Pieces(), []
    with sdk(server) as client:
        for event in client.responses.create(
            model=server.model, input="Tell a story of the sea.", max_output_tokens=24, temperature=0, stream=True
        ):
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                pieces.add(event.delta)
            if event.type in {"response.completed", "response.incomplete"}:
                assert event.response.output_text == pieces.text
    pieces.came_over_time()
    assert kinds[0] == "response.created"
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    assert "response.output_item.added" in kinds
    assert "response.content_part.done" in kinds


@checks.that("responses: parse() into a model")
def responses_parse(server: Server) -> None:
    with sdk(server) as client:
        reply = client.responses.parse(
            model=server.model, input="Invent a person.", text_format=Person, max_output_tokens=80, temperature=0
        )
        assert isinstance(reply.output_parsed, Person)


@checks.that("responses: a function call, its output sent back")
def responses_tools(server: Server) -> None:
    function = {**WEATHER["function"], "type": "function"}
    with sdk(server) as client:
        first = client.responses.create(
            model=server.model,
            input=ASK,
            tools=[function],
            tool_choice={"type": "function", "name": "get_weather"},
            max_output_tokens=60,
            temperature=0,
        )
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert set(json.loads(call.arguments)) == {"city", "celsius"}
        history: Any = [
            *ASK,
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "clear, 21 degrees"},
        ]
        second = client.responses.create(model=server.model, input=history, max_output_tokens=16)
        assert second.output_text


@checks.that("files and batches: uploaded, run, fetched line by line")
def batches(server: Server) -> None:
    lines = [
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": server.model, "messages": ASK, "max_tokens": 4},
            }
        )
        for number in range(5)
    ]
    with sdk(server) as client:
        source = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        assert client.files.retrieve(source.id).bytes == len("\n".join(lines))
        batch = client.batches.create(input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h")
        while batch.status in {"validating", "in_progress", "finalizing"}:
            time.sleep(0.5)
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 0)
        assert batch.output_file_id
        found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(line["custom_id"] for line in found) == [f"line-{number}" for number in range(5)]
        assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in found)
        assert batch.id in [item.id for item in client.batches.list()]
        assert client.files.delete(source.id).deleted


@checks.that("errors: bad value, unknown model, wrong type are typed and named")
def errors(server: Server) -> None:
    with sdk(server) as client:

        def chat_with(**options: Any) -> Any:
            return lambda: client.chat.completions.create(
                **{"model": server.model, "messages": ASK, "max_tokens": 4, **options}
            )

        bad = refused(openai.BadRequestError, chat_with(temperature=9))
        assert "temperature" in str(bad)
        unknown = refused(openai.NotFoundError, chat_with(model="gpt-none"))
        assert "gpt-none" in str(unknown)
        refused(openai.BadRequestError, chat_with(messages="hello"))


@checks.that("errors: a wrong key")
def wrong_key(server: Server) -> None:
    if not server.key:
        raise NotRunError("this server asks for no key")
    with sdk(server, api_key="wrong") as client:
        refused(openai.AuthenticationError, client.models.list)


@checks.that("errors: a prompt beyond the window says so, with both figures")
def overflow(server: Server) -> None:
    with sdk(server) as client:
        long: Any = [{"role": "user", "content": "word " * (server.context_tokens + 500)}]
        error = refused(
            openai.BadRequestError,
            lambda: client.chat.completions.create(model=server.model, messages=long, max_tokens=4),
        )
        assert "context" in str(error)
        assert str(server.context_tokens) in str(error)


@checks.that("errors: an image sent to a model of text is refused")
def image(server: Server) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    with sdk(server) as client:
        error = refused(
            openai.BadRequestError,
            lambda: client.chat.completions.create(
                model=server.model, messages=[{"role": "user", "content": parts}], max_tokens=4
            ),
        )
        assert any(word in str(error) for word in ("image", "multimodal"))


@checks.that("the request id is told (x-request-id)")
def request_id(server: Server) -> None:
    with sdk(server) as client:
        reply = client.chat.completions.create(model=server.model, messages=ASK, max_tokens=2)
        assert reply._request_id  # noqa: SLF001 - the SDK documents it so


@checks.that("retries: a lost deadline is not asked again")
def retries(server: Server) -> None:
    if not server.ours:
        raise NotRunError("no deadlines: a header of Overspill's own")
    asked: list[str] = []
    with (
        openai.DefaultHttpxClient(event_hooks={"request": [lambda request: asked.append(request.url.path)]}) as http,
        sdk(server, http_client=http, max_retries=2) as client,
    ):
        refused(
            openai.APIStatusError,
            lambda: client.chat.completions.create(
                model=server.model, messages=ASK, max_tokens=400, extra_headers={"x-overspill-deadline-ms": "1"}
            ),
        )
        assert len(asked) == 1


checks.run()
