"""LlamaIndex's `OpenAILike`, which reads the annotations of tools: they are no strings here."""

from typing import Any, Literal

import pydantic
from checking import Checks, Pieces, Server
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

checks = Checks(("llama-index-llms-openai-like", "llama-index-embeddings-openai-like", "llama-index-core", "openai"))


class Person(pydantic.BaseModel):
    """A person."""

    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=10, le=99)


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather in a city."""
    return f"It is clear in {city}."


def model(server: Server, **options: Any) -> OpenAILike:
    told = {"is_chat_model": True, "max_tokens": 24, "temperature": 0, "max_retries": 0, "timeout": 80.0, **options}
    return OpenAILike(
        model=server.model,
        api_base=server.openai_url,
        api_key=server.key,
        context_window=server.context_tokens,
        **told,
    )


@checks.that("chat")
def chat(server: Server) -> None:
    reply = model(server).chat([ChatMessage(role="user", content="Say hello.")])
    assert reply.message.content


@checks.that("stream_chat")
def stream(server: Server) -> None:
    pieces = Pieces()
    for chunk in model(server).stream_chat([ChatMessage(role="user", content="Tell a story of the sea.")]):
        pieces.add(chunk.delta)
    pieces.came_over_time()


@checks.that("achat")
async def achat(server: Server) -> None:
    reply = await model(server).achat([ChatMessage(role="user", content="Say hello.")])
    assert reply.message.content


@checks.that("complete, by /v1/completions")
def complete(server: Server) -> None:
    assert "Paris" in model(server, is_chat_model=False, max_tokens=6).complete("The capital of France is").text


@checks.that("chat_with_tools: forced call")
def tools(server: Server) -> None:
    llm = model(server, is_function_calling_model=True, max_tokens=60, strict=True)
    weather = FunctionTool.from_defaults(get_weather)
    reply = llm.chat_with_tools(
        [weather], user_msg="What is the weather in Paris?", tool_choice="get_weather", tool_required=True
    )
    (call,) = llm.get_tool_calls_from_response(reply)
    assert call.tool_name == "get_weather"
    assert call.tool_kwargs["city"] in {"Paris", "Rome"}


@checks.that("structured_predict: json_schema")
def structured(server: Server) -> None:
    llm = model(server, should_use_structured_outputs=True, max_tokens=80)
    told = llm.as_structured_llm(Person).complete("Invent a person.")
    assert isinstance(told.raw, Person)


@checks.that("embeddings (OpenAILikeEmbedding)")
def embeddings(server: Server) -> None:
    server.wants_embeddings()
    embedder = OpenAILikeEmbedding(
        model_name=server.embeddings_model,
        api_base=f"{server.embeddings_url}/v1",
        api_key=server.key,
        max_retries=0,
    )
    assert len(embedder.get_query_embedding("A cat.")) == 384
    assert [len(vector) for vector in embedder.get_text_embedding_batch(["A cat.", "A kitten."])] == [384, 384]


checks.run()
