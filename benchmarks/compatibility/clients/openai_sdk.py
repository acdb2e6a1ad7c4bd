"""What the checks of OpenAI's SDK for Python share."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
from checking import Checks, Server

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
