"""OpenAI's SDK for Python: everything else that it has, and its errors."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import openai
from checking import NotRunError, Pieces, Server, refused
from openai_sdk import ASK, PIXEL, WEATHER, Person, checks, embedder, sdk


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


@checks.that("audio: speech, streamed and whole")
def speech(server: Server) -> None:
    voice = server.wants(server.voice, "speaks")
    with sdk(server) as client:
        whole = client.audio.speech.create(model=voice, input="one two three", voice="alloy")
        assert len(whole.content) == 3 * 1024
        with client.audio.speech.with_streaming_response.create(model=voice, input="one two", voice="alloy") as reply:
            assert reply.headers["content-type"] == "audio/mpeg"
            assert sum(map(len, reply.iter_bytes())) == 2 * 1024


@checks.that("audio: a transcription and a translation")
def transcriptions(server: Server) -> None:
    voice, sound = server.wants(server.voice, "hears"), ("talk.wav", bytes(5000), "audio/wav")
    with sdk(server) as client:
        assert client.audio.transcriptions.create(model=voice, file=sound).text == "5000 bytes of talk.wav"
        assert client.audio.translations.create(model=voice, file=sound).text == "5000 bytes of talk.wav"


@checks.that("chat: an image and a sound, for a model that takes them")
def media(server: Server) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    parts: Any = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    ]
    with sdk(server) as client:
        reply = client.chat.completions.create(
            model=server.wants(server.viewer, "sees"), messages=[{"role": "user", "content": parts}], max_tokens=9
        )
        assert reply.choices[0].message.content == "text image_url input_audio "
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == 300


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
