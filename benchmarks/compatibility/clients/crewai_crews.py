"""CrewAI: its model alone, by chats and by responses, and crews whose agents have a tool or a form to fill."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
from checking import Checks, Server, refused

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.events.event_bus import crewai_event_bus
from crewai.tools import tool
from crewai.utilities.exceptions.context_window_exceeding_exception import LLMContextLengthExceededError

checks = Checks(("crewai", "openai"))


class Report(pydantic.BaseModel):
    """What an answer is parsed into."""

    city: Literal["Paris", "Rome"]
    celsius: bool


@tool("get_weather")
def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"It is clear in {city}."


def model(server: Server, **options: Any) -> LLM:
    told = {"model": f"openai/{server.model}", "base_url": server.openai_url, "api_key": server.key, "max_retries": 0}
    return LLM(**{**told, "max_tokens": 80, "temperature": 0, **options})


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Have all that it prints, threads of its own included, go where our report does not stand."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
        crewai_event_bus.flush()


def called(llm: LLM, asked: str) -> Any:
    with quietly():
        return llm.call(asked)


def crew(server: Server, **wanted: Any) -> Any:
    acting = {"role": "helper", "goal": "help", "backstory": "You are brief.", "max_iter": 2, "verbose": False}
    agent = Agent(**acting, llm=model(server), tools=wanted.pop("tools", []))
    task = Task(description="Tell the weather in Paris.", expected_output="the weather", agent=agent, **wanted)
    with quietly():
        return Crew(agents=[agent], tasks=[task], verbose=False).kickoff()


@checks.that("the model alone, whole and streamed, the same answer")
def plain(server: Server) -> None:
    whole = called(model(server), "Say hello.")
    assert whole
    assert called(model(server, stream=True), "Say hello.") == whole


@checks.that("the model alone: a stop string")
def stop(server: Server) -> None:
    assert " " not in called(model(server, stop=[" "]), "Say hello.")


@checks.that("the model alone, by responses")
def responses(server: Server) -> None:
    assert called(model(server, api="responses"), "Say hello.")


@checks.that("an answer under a Pydantic model")
def structured(server: Server) -> None:
    assert isinstance(called(model(server, response_format=Report), "The weather in Paris?"), Report)


@checks.that("a crew whose agent has a tool reaches an end")
def tools(server: Server) -> None:
    assert crew(server, tools=[get_weather]).raw


@checks.that("a crew whose task has a form to fill")
def form(server: Server) -> None:
    assert isinstance(crew(server, output_pydantic=Report).pydantic, Report)


@checks.that("errors: an unknown model, a prompt beyond the window")
def errors(server: Server) -> None:
    unknown = refused(Exception, lambda: called(model(server, model="openai/gpt-none"), "Say hello."))
    assert "gpt-none" in str(unknown)
    long = "word " * (server.context_tokens + 500)
    refused(LLMContextLengthExceededError, lambda: called(model(server), long))


checks.run()
