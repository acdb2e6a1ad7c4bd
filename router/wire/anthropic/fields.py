"""The bodies of /v1/messages and /v1/messages/count_tokens, typed strictly: an error names the field by its path.

What a field asks for that nobody here does is refused by name; fields that nobody knows are passed over, as Anthropic's
clients add new ones with each of their betas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.wire.openai.sampling import Effort
from router.wire.openai.tools import FunctionName
from router.wire.sampling import MaxTokens, Temperature, TopK, TopP


class Source(msgspec.Struct, frozen=True):
    """Where an image or a document is."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[Block] | None = None


class Block(msgspec.Struct, frozen=True):
    """A block of content, of whatever type; `cache_control` and citations change nothing here."""

    type: str
    text: str | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    content: str | list[Block] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct, frozen=True):
    """One of `messages`."""

    role: str
    content: str | list[Block]
    clear_at: str | None = None


class ToolOffered(msgspec.Struct, frozen=True):
    """One of `tools`."""

    type: str | None = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class Choice(msgspec.Struct, frozen=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Whether thoughts are told: a model that reasons does so as it was trained to."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: MaxTokens | None = None
    display: str | None = None


class Format(msgspec.Struct, frozen=True):
    """What the answer has to match."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """How the answer is to be."""

    effort: Effort | None = None
    format: Format | None = None


class CountCall(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that make the prompt: the body of /v1/messages/count_tokens."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[ToolOffered] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None
    context_management: Any = None
    # Known, and served only at the value that changes nothing.
    mcp_servers: Any = None
    container: Any = None
    thread: Any = None


class MessagesCall(CountCall, frozen=True, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
    compaction: Any = None  # which changes no count
