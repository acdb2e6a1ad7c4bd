"""LiteLLM's `completion()` and `embedding()`."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet for prices

import litellm
from checking import Checks, Pieces, Server, refused

checks = Checks(("litellm", "openai"))
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def options(server: Server, **others: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{server.model}",
        "api_base": server.openai_url,
        "api_key": server.key,
        "num_retries": 0,
        "max_retries": 0,
        "messages": ASK,
        "max_tokens": 16,
        "temperature": 0,
        **others,
    }


@checks.that("completion")
def completion(server: Server) -> None:
    reply: Any = litellm.completion(**options(server))
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens <= 16


@checks.that("completion, streamed")
def stream(server: Server) -> None:
    pieces = Pieces()
    told = [{"role": "user", "content": "Tell a story of the sea."}]
    for chunk in litellm.completion(**options(server, messages=told, max_tokens=60, stream=True)):
        pieces.add(chunk.choices[0].delta.content)
    pieces.came_over_time()


@checks.that("hosted_vllm: the provider for servers like vLLM")
async def hosted(server: Server) -> None:
    reply: Any = await litellm.acompletion(**options(server, model=f"hosted_vllm/{server.model}"))
    assert reply.choices[0].message.content


@checks.that("text_completion")
def text_completion(server: Server) -> None:
    told = options(server, model=f"text-completion-openai/{server.model}", prompt="The capital of France is")
    del told["messages"]
    reply: Any = litellm.text_completion(**told)
    assert "Paris" in reply.choices[0].text


@checks.that("tools: forced call")
def tools(server: Server) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    reply: Any = litellm.completion(**options(server, tools=[WEATHER], tool_choice=named, max_tokens=60))
    (call,) = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}


@checks.that("response_format: json_schema")
def schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER["function"]["parameters"]}}
    reply: Any = litellm.completion(**options(server, response_format=form, max_tokens=60))
    assert json.loads(reply.choices[0].message.content)["city"] in {"Paris", "Rome"}


@checks.that("responses()")
def responses(server: Server) -> None:
    reply: Any = litellm.responses(
        model=f"openai/{server.model}",
        input="Say hello.",
        max_output_tokens=16,
        api_base=server.openai_url,
        api_key=server.key,
    )
    assert reply.output[0].content[0].text


@checks.that("context overflow is ContextWindowExceededError")
def overflow(server: Server) -> None:
    told = [{"role": "user", "content": "word " * (server.context_tokens + 500)}]
    refused(litellm.ContextWindowExceededError, lambda: litellm.completion(**options(server, messages=told)))


@checks.that("errors: unknown model, wrong key")
def errors(server: Server) -> None:
    refused(litellm.NotFoundError, lambda: litellm.completion(**options(server, model="openai/none")))
    refused(litellm.AuthenticationError, lambda: litellm.completion(**options(server, api_key="wrong")))


@checks.that("embedding")
def embedding(server: Server) -> None:
    server.wants_embeddings()
    reply: Any = litellm.embedding(
        model=f"openai/{server.embeddings_model}",
        input=["A cat.", "A kitten."],
        api_base=f"{server.embeddings_url}/v1",
        api_key=server.key,
    )
    assert [len(item["embedding"]) for item in reply.data] == [384, 384]


@checks.that("rerank (hosted_vllm)")
def rerank(server: Server) -> None:
    reply: Any = litellm.rerank(
        model=f"hosted_vllm/{server.wants(server.ranker, 'ranks')}",
        query="What is the capital of France?",
        documents=["Cats sleep.", "Paris is the capital of France."],
        top_n=1,
        api_base=server.embeddings_url,
        api_key=server.key,
    )
    (best,) = reply.results
    assert best["index"] == 1


@checks.that("speech and transcription")
def sounds(server: Server) -> None:
    told: Any = {
        "model": f"openai/{server.wants(server.voice, 'speaks')}",
        "api_base": server.openai_url,
        "api_key": server.key,
    }
    spoken: Any = litellm.speech(input="one two", voice="alloy", **told)
    assert len(spoken.content) == 2048
    heard: Any = litellm.transcription(file=("talk.mp3", spoken.content), **told)
    assert heard.text == "2048 bytes of talk.mp3"


checks.run()
