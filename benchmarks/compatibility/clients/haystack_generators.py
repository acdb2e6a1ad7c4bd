"""Haystack: its generators and embedders, alone and in a pipeline."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

import pydantic
from checking import Checks, Pieces, Server
from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

checks = Checks(("haystack-ai", "openai"))
QUESTION = [ChatMessage.from_user("What is the weather in Paris?")]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"]}


class Person(pydantic.BaseModel):
    """A person, and nothing more."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=10, le=99)


def generator(server: Server, **more: Any) -> OpenAIChatGenerator:
    options = {"max_tokens": 60, "temperature": 0, **more.pop("generation_kwargs", {})}
    return OpenAIChatGenerator(
        api_key=Secret.from_token(server.key),
        model=server.model,
        api_base_url=server.openai_url,
        generation_kwargs=options,
        max_retries=0,
        timeout=80,
        **more,
    )


@checks.that("a chat")
def chat(server: Server) -> None:
    (reply,) = generator(server).run(QUESTION)["replies"]
    assert reply.text
    assert reply.meta["usage"]["completion_tokens"] > 0


@checks.that("a stream: pieces over time")
def stream(server: Server) -> None:
    pieces = Pieces()
    asked = generator(server, streaming_callback=lambda piece: pieces.add(piece.content))
    asked.run([ChatMessage.from_user("Tell a story of the sea.")])
    pieces.came_over_time()


@checks.that("an answer under a Pydantic model")
def schema(server: Server) -> None:
    (reply,) = generator(server, generation_kwargs={"response_format": Person, "max_tokens": 120}).run(
        [ChatMessage.from_user("Invent a person.")]
    )["replies"]
    assert Person.model_validate(json.loads(reply.text))


@checks.that("a tool: called, and its result kept in the history")
def tools(server: Server) -> None:
    tool = Tool("get_weather", "The weather of a city.", CITY, lambda city: f"clear in {city}")
    (reply,) = generator(server, tools=[tool], generation_kwargs={"tool_choice": "required", "max_tokens": 120}).run(
        QUESTION
    )["replies"]
    call = reply.tool_calls[0]
    assert call.arguments["city"] in {"Paris", "Rome"}
    told = ChatMessage.from_tool(tool.invoke(**call.arguments), origin=call)
    (last,) = generator(server).run([*QUESTION, reply, told])["replies"]
    assert last.text


@checks.that("a pipeline: a prompt from a template")
def pipeline(server: Server) -> None:
    flow = Pipeline()
    flow.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("The capital of {{country}}?")]))
    flow.add_component("llm", generator(server))
    flow.connect("prompt.prompt", "llm.messages")
    assert flow.run({"prompt": {"country": "France"}})["llm"]["replies"][0].text


@checks.that("embedders of texts and documents")
def embedders(server: Server) -> None:
    server.wants_embeddings()
    told: dict[str, Any] = {
        "api_key": Secret.from_token(server.key),
        "model": server.embeddings_model,
        "api_base_url": f"{server.embeddings_url}/v1",
    }
    assert len(OpenAITextEmbedder(**told).run("A cat.")["embedding"]) == 384
    texts = [Document(content="A cat."), Document(content="A dog.")]
    found = OpenAIDocumentEmbedder(progress_bar=False, **told).run(texts)["documents"]
    assert [len(document.embedding) for document in found] == [384, 384]


checks.run()
