"""The body of /v1/chat/completions → `ApiRequest`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from router.base.errors import InvalidRequest
from router.values.prompt import ChatPrompt, Message
from router.values.request import ApiRequest
from router.wire.body import decode_json
from router.wire.names import checked_field_names
from router.wire.openai.fields import UNSERVED, Fields, refuse_constraint_beside, request_of
from router.wire.openai.media import media_in
from router.wire.openai.messages import RawMessage, message_of
from router.wire.openai.sampling import Effort, TopLogprobs, sampling_of
from router.wire.openai.template_kwargs import template_kwargs_of
from router.wire.openai.tools import Function, FunctionChoice, NamedTool, RawTool, custom_names, functions_of, tools_of
from router.wire.openai.unserved import Unserved, only

MAX_MESSAGES = 16_384
"""More turns than windows have tokens; a body full of empty ones would keep the event loop busy for seconds."""


class _Chat(Fields, frozen=True, kw_only=True):
    messages: list[RawMessage]
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[RawTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    functions: list[Function] | None = None
    function_call: FunctionChoice | None = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    echo: Any = None
    best_of: Any = None
    suffix: Any = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Any = None
    add_special_tokens: Any = None


_UNSERVED = Unserved(
    *UNSERVED,
    ("modalities", only(["text"]), 'answers are plain text: leave it out or send ["text"]'),
    ("audio", only(), "answers are plain text: leave it out"),
    ("web_search_options", only(), "web search is not offered by this server: leave it out"),
    ("best_of", only(1), "send `n`, and choose among the answers"),
    ("suffix", only(""), "messages have no text behind the answer: leave it out"),
    ("echo", only(False), "messages are not echoed: send a prompt to /v1/completions"),
    ("chat_template", only(), "the model's own is used: render the prompt yourself and send it to /v1/completions"),
    ("documents", only([]), "put them into a message"),
    ("add_special_tokens", only(False), "the model's template sets them: leave it out"),
)
_decoder = msgspec.json.Decoder(_Chat)
_FIELDS = frozenset(_Chat.__struct_fields__)
CHAT_BODY = _Chat  # what the description of the API shows


def decode_chat(body: bytes) -> ApiRequest:
    """Decode the body of /v1/chat/completions.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_decoder, body)
    _UNSERVED.refuse(raw, checked_field_names(body, _FIELDS))
    if len(raw.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"`messages`: {len(raw.messages)}, at most {MAX_MESSAGES} are read", param="messages")
    messages = [message_of(message, index) for index, message in enumerate(raw.messages)]
    if not messages:
        raise InvalidRequest("`messages` is empty: send at least one message", param="messages")
    continuation = _take_continuation(raw, messages)
    tools = tools_of(raw.tools, raw.tool_choice, parallel=raw.parallel_tool_calls)
    legacy = functions_of(raw.functions, raw.function_call) if tools is None else None
    template_kwargs = template_kwargs_of(raw.chat_template_kwargs)
    prompt = ChatPrompt(tuple(messages), tools or legacy, media_in(messages), template_kwargs)
    sampling = sampling_of(raw, None, _logprobs(raw))
    if raw.reasoning_effort is not None:
        sampling = replace(sampling, reasoning_effort=raw.reasoning_effort)
    request = request_of(raw, prompt, continuation, sampling)
    refuse_constraint_beside(prompt.tools, request.sampling.constraint)
    return replace(request, legacy_functions=legacy is not None, custom_tools=custom_names(raw.tools))


def _take_continuation(raw: _Chat, messages: list[Message]) -> str:
    """Pop the assistant's beginning off `messages` if the request asks to continue it."""
    if not raw.continue_final_message:
        if raw.add_generation_prompt is False:
            raise InvalidRequest(
                "`add_generation_prompt`: false is served together with `continue_final_message`: true only",
                param="add_generation_prompt",
            )
        return ""
    if raw.add_generation_prompt is not False:
        raise InvalidRequest(
            "`continue_final_message`: true needs `add_generation_prompt`: false", param="continue_final_message"
        )
    at = f"messages[{len(messages) - 1}]"
    if messages[-1].role != "assistant":
        raise InvalidRequest(
            f"`{at}.role`: `continue_final_message` needs a last message of role `assistant`", param=f"{at}.role"
        )
    if len(messages) == 1:
        raise InvalidRequest("`messages`: nothing precedes the message to continue", param="messages")
    if messages[-1].tool_calls:
        raise InvalidRequest(
            f"`{at}.tool_calls`: what is to be continued is text: send the call as its `content`",
            param=f"{at}.tool_calls",
        )
    return messages.pop().content


def _logprobs(raw: _Chat) -> int | None:
    """Return how many alternatives are told beside each token, None for no log probabilities at all."""
    if raw.logprobs:
        return raw.top_logprobs or 0
    if raw.top_logprobs:
        raise InvalidRequest("`top_logprobs` is served together with `logprobs`: true only", param="top_logprobs")
    return None
