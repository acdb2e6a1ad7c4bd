"""LangChain's `langchain-openai`."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from checking import Checks, Pieces, Server
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

checks = Checks(("langchain-openai", "langchain-core", "openai"))


class Person(pydantic.BaseModel):
    """A person."""

    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=10, le=99)


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather in a city."""
    return f"It is clear in {city}."


def model(server: Server, **options: Any) -> ChatOpenAI:
    told = {"max_tokens": 24, "temperature": 0, "max_retries": 0, "timeout": 80, **options}
    return ChatOpenAI(model=server.model, base_url=server.openai_url, api_key=server.key, **told)


@checks.that("invoke")
def invoke(server: Server) -> None:
    reply = model(server).invoke("Say hello.")
    assert isinstance(reply, AIMessage)
    assert reply.content
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["output_tokens"] > 0


@checks.that("stream, with usage")
def stream(server: Server) -> None:
    pieces, total = Pieces(), None
    for chunk in model(server, stream_usage=True).stream("Tell a story of the sea."):
        pieces.add(str(chunk.content))
        total = chunk if total is None else total + chunk
    pieces.came_over_time()
    assert total is not None
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == 24


@checks.that("batch and ainvoke")
async def batch(server: Server) -> None:
    replies = await model(server).abatch(["Say hello.", "Say goodbye.", "Say yes."])
    assert [bool(reply.content) for reply in replies] == [True] * 3


@checks.that("completions (OpenAI)")
def completions(server: Server) -> None:
    llm = OpenAI(
        model=server.model, base_url=server.openai_url, api_key=server.key, max_tokens=6, temperature=0, max_retries=0
    )
    assert "Paris" in llm.invoke("The capital of France is")
    both = llm.generate(["The capital of France is", "The capital of Italy is"])
    assert "Rome" in both.generations[1][0].text


@checks.that("bind_tools: forced call, result sent back")
def bind_tools(server: Server) -> None:
    bound = model(server, max_tokens=60).bind_tools([get_weather], tool_choice="get_weather", strict=True)
    first = bound.invoke("What is the weather in Paris?")
    assert isinstance(first, AIMessage)
    (call,) = first.tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in {"Paris", "Rome"}
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    second = model(server).invoke([HumanMessage("What is the weather in Paris?"), first, result])
    assert second.content


@checks.that("bind_tools, streamed")
def stream_tools(server: Server) -> None:
    bound = model(server, max_tokens=60).bind_tools([get_weather], tool_choice="get_weather", strict=True)
    total = None
    for chunk in bound.stream("What is the weather in Paris?"):
        total = chunk if total is None else total + chunk
    assert isinstance(total, AIMessage)
    assert total.tool_calls[0]["args"]["city"] in {"Paris", "Rome"}


@checks.that("with_structured_output: json_schema")
def structured(server: Server) -> None:
    person = model(server, max_tokens=80).with_structured_output(Person).invoke("Invent a person.")
    assert isinstance(person, Person)


@checks.that("with_structured_output: function_calling")
def structured_by_function(server: Server) -> None:
    asked = model(server, max_tokens=80).with_structured_output(Person, method="function_calling", strict=True)
    assert isinstance(asked.invoke("Invent a person."), Person)


@checks.that("use_responses_api: invoke and stream")
def responses(server: Server) -> None:
    asked = model(server, use_responses_api=True)
    assert asked.invoke("Say hello.").text
    assert sum(bool(chunk.text) for chunk in asked.stream("Tell a story of the sea.")) >= 4


@checks.that("logprobs")
def logprobs(server: Server) -> None:
    reply = model(server, max_tokens=4).bind(logprobs=True, top_logprobs=2).invoke("Say hello.")
    told = reply.response_metadata["logprobs"]["content"]
    assert "".join(item["token"] for item in told) == reply.content


@checks.that("context overflow is ContextOverflowError")
def overflow(server: Server) -> None:
    try:
        model(server).invoke("word " * (server.context_tokens + 500))
    except ContextOverflowError:
        return
    raise AssertionError("served")


@checks.that("embeddings (OpenAIEmbeddings)")
def embeddings(server: Server) -> None:
    server.wants_embeddings()
    embedder = OpenAIEmbeddings(
        model=server.embeddings_model,
        base_url=f"{server.embeddings_url}/v1",
        api_key=server.key,
        check_embedding_ctx_length=False,  # LangChain's own setting for models that are not OpenAI's
    )
    vectors = embedder.embed_documents(["A cat.", "A kitten."])
    assert [len(vector) for vector in vectors] == [384, 384]
    assert len(embedder.embed_query("A cat.")) == 384


checks.run()
