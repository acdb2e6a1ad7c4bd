"""OpenAI requests → values. The replies are in `openai_reply`.

Every known field is typed strictly: a wrong type or a value out of range is an `InvalidRequest` whose `param` is the
field's path (`messages[1].content[0].text`). A known field that would change the answer and is not served here
(`tools`, `logprobs`, `n` > 1, …) is refused by name, never dropped. So is a promise that belongs into a header
(`locality`). Fields nobody knows are tolerated, as clients of OpenAI-compatible servers expect: SDKs send vendor extras
to every base URL.

Extensions: vLLM's `top_k`, `repetition_penalty`, `ignore_eos`, `continue_final_message`, `add_generation_prompt` and
`stream_options.continuous_usage_stats`; `priority` (higher is better, as in `x-overspill-priority`); and
`overspill_continuation`, text of a completion that was already emitted and is to be continued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.values.request import ApiRequest, ChatPrompt, Message, Prompt, SamplingParams, TextPrompt, TokenPrompt
from router.wire.body import decode_json
from router.wire.names import refuse_fields
from router.wire.sampling import (
    COMPLETION_MAX_TOKENS,
    MaxTokens,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    stop_strings,
)

MAX_MESSAGES = 16_384
"""More turns than windows have tokens; a body full of empty ones would keep the event loop busy for seconds."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

S = TypeVar("S")

_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    service_tier: str | None = None
    priority: _Int32 | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    # Known, and served only at the value that changes nothing.
    n: Any = None
    logprobs: Any = None
    logit_bias: Any = None
    response_format: Any = None
    min_p: Any = None
    min_tokens: Any = None
    stop_token_ids: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    use_beam_search: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


class _Chat(_Common, frozen=True, kw_only=True):
    messages: list[_Message]
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class _Completion(_Common, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]]
    overspill_continuation: str | None = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


def _is(*allowed: object) -> Callable[[object], bool]:
    return lambda value: any(value == one and type(value) is type(one) for one in allowed)


_Rule = tuple[str, Callable[[object], bool], str]

_NEUTRAL: tuple[_Rule, ...] = (
    ("n", _is(1), "one choice is generated per request: leave `n` out or set it to 1"),
    ("logprobs", _is(False), "log probabilities are not returned by this server: leave it out"),
    ("logit_bias", _is({}), "token biases are not applied by this server: leave it out"),
    ("response_format", _is({"type": "text"}), 'answers are plain text: leave it out or send {"type": "text"}'),
    ("min_p", _is(0, 0.0), "not applied by this server: use `top_p` or `top_k`"),
    ("min_tokens", _is(0), "not applied by this server: leave it out"),
    ("stop_token_ids", _is([]), "not applied by this server: use `stop`"),
    ("bad_words", _is([]), "not applied by this server: leave it out"),
    ("allowed_token_ids", _is([]), "not applied by this server: leave it out"),
    ("use_beam_search", _is(False), "beam search is not offered: leave it out"),
    *(
        (name, _is(), "constrained decoding is not offered: leave it out")
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
    ),
)
_NEUTRAL_CHAT: tuple[_Rule, ...] = (
    *_NEUTRAL,
    ("top_logprobs", _is(0), "log probabilities are not returned by this server: leave it out"),
    ("tools", _is([]), "tool calls are not offered by this server: leave it out"),
    ("tool_choice", _is("none", "auto"), "tool calls are not offered by this server: leave it out"),
    ("functions", _is([]), "function calls are not offered by this server: leave it out"),
    ("function_call", _is("none", "auto"), "function calls are not offered by this server: leave it out"),
    ("modalities", _is(["text"]), 'answers are plain text: leave it out or send ["text"]'),
    ("audio", _is(), "answers are plain text: leave it out"),
    ("web_search_options", _is(), "web search is not offered by this server: leave it out"),
)
_NEUTRAL_COMPLETION: tuple[_Rule, ...] = (
    *_NEUTRAL,
    ("best_of", _is(1), "one choice is generated per request: leave `best_of` out or set it to 1"),
    ("echo", _is(False), "the prompt is not echoed: leave `echo` out"),
    ("suffix", _is(""), "filling in the middle is not offered: leave `suffix` out"),
)


_chat_decoder = msgspec.json.Decoder(_Chat)
_completion_decoder = msgspec.json.Decoder(_Completion)


def decode_chat(body: bytes) -> ApiRequest:
    """Decode the body of /v1/chat/completions.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_chat_decoder, body)
    refuse_fields(body, _Chat.__struct_fields__)
    _refuse_unserved(raw, _NEUTRAL_CHAT)
    if len(raw.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"`messages`: {len(raw.messages)}, at most {MAX_MESSAGES} are read", param="messages")
    messages = [_message(message, index) for index, message in enumerate(raw.messages)]
    if not messages:
        raise InvalidRequest("`messages` is empty: send at least one message", param="messages")
    continuation = _take_continuation(raw, messages)
    return _request(raw, ChatPrompt(tuple(messages)), continuation, None)


def decode_completion(body: bytes) -> ApiRequest:
    """Decode the body of /v1/completions.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_completion_decoder, body)
    refuse_fields(body, _Completion.__struct_fields__)
    _refuse_unserved(raw, _NEUTRAL_COMPLETION)
    return _request(raw, _prompt(raw.prompt), raw.overspill_continuation or "", COMPLETION_MAX_TOKENS)


def _refuse_unserved(raw: _Common, rules: tuple[_Rule, ...]) -> None:
    for name, neutral, remedy in rules:
        value = getattr(raw, name)
        if value is not None and not neutral(value):
            raise InvalidRequest(f"`{name}`: {remedy}", param=name)


def _message(raw: _Message, index: int) -> Message:
    at = f"messages[{index}]"
    if raw.role not in _ROLES:
        hint = " (tool calls are not offered by this server)" if raw.role in {"tool", "function"} else ""
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"`{at}.role`: got `{raw.role[:40]}`, expected one of {known}{hint}", param=f"{at}.role")
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(raw, name):
            raise InvalidRequest(f"`{at}.{name}` is not offered by this server: leave it out", param=f"{at}.{name}")
    if raw.content is None:
        raise InvalidRequest(f"`{at}.content` is required", param=f"{at}.content")
    if isinstance(raw.content, str):
        return Message(_ROLES[raw.role], raw.content)
    return Message(_ROLES[raw.role], "".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(raw.content)))


def _part(part: _Part, at: str) -> str:
    if part.type != "text":
        raise InvalidRequest(f"`{at}`: `{part.type[:40]}` is not served: send parts of type `text`", param=at)
    if part.text is None:
        raise InvalidRequest(f"`{at}.text` is required", param=f"{at}.text")
    return part.text


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
    return messages.pop().content


def _prompt(raw: str | list[int | str | list[int]]) -> Prompt:
    if isinstance(raw, list) and len(raw) == 1 and not isinstance(raw[0], int):
        raw = raw[0]  # type: ignore[assignment]  # a batch of one: text or token ids
    if not raw:
        raise InvalidRequest("`prompt` is empty: send text, or at least one token id", param="prompt")
    if isinstance(raw, str):
        return TextPrompt(raw)
    ids = []
    for index, token_id in enumerate(raw):
        if not isinstance(token_id, int):
            raise InvalidRequest(
                "`prompt`: one prompt per request: send a string or one list of token ids", param="prompt"
            )
        if not 0 <= token_id < 2**31:
            raise InvalidRequest(f"`prompt[{index}]`: {token_id} is no token id", param=f"prompt[{index}]")
        ids.append(token_id)
    return TokenPrompt(tuple(ids))


def _request(raw: _Common, prompt: Prompt, continuation: str, default_max_tokens: int | None) -> ApiRequest:
    options = raw.stream_options
    if options is not None and not raw.stream:
        raise InvalidRequest("`stream_options` is served together with `stream`: true only", param="stream_options")
    sampling = SamplingParams(
        max_tokens=raw.max_completion_tokens or raw.max_tokens or default_max_tokens,
        temperature=_or(raw.temperature, 1.0),
        top_p=_or(raw.top_p, 1.0),
        top_k=max(0, _or(raw.top_k, 0)),
        seed=raw.seed,
        stop=stop_strings(raw.stop),
        presence_penalty=_or(raw.presence_penalty, 0.0),
        frequency_penalty=_or(raw.frequency_penalty, 0.0),
        repetition_penalty=_or(raw.repetition_penalty, 1.0),
        ignore_eos=bool(raw.ignore_eos),
    )
    return ApiRequest(
        model=raw.model,
        prompt=prompt,
        sampling=sampling,
        stream=bool(raw.stream),
        include_usage=bool(options and options.include_usage),
        running_usage=bool(options and options.continuous_usage_stats),
        priority=raw.priority,
        continuation=continuation,
    )


def _or(value: S | None, default: S) -> S:
    return default if value is None else value
