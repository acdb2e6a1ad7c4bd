"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import parse_qsl

import msgspec
import orjson
from msgspec import Meta

from router.base.errors import InvalidRequest
from router.values.prompt import ChatPrompt, Prompt, TextPrompt, TokenizerFacts
from router.wire.body import decode_json
from router.wire.names import MAX_FIELDS, checked_field_names, refuse_fields
from router.wire.openai.messages import RawMessage, message_of
from router.wire.openai.template_kwargs import template_kwargs_of
from router.wire.openai.tools import NamedTool, RawTool, tools_of
from router.wire.openai.unserved import Unserved, only
from router.wire.sampling import token_ids

MAX_DETOKENIZED = 1_048_576

Model = Annotated[str, Meta(min_length=1, max_length=256)]


class TokenizeCall(msgspec.Struct, frozen=True):
    """The body of /tokenize: `prompt`, or `messages` and `tools` as in a chat; without `model` the one served alone."""

    model: Model | None = None
    prompt: str | None = None
    messages: list[RawMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Any = None
    tools: list[RawTool] | None = None
    tool_choice: str | NamedTool | None = None


class DetokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /detokenize; without `model` the one that is served alone."""

    model: Model | None = None
    tokens: list[int]


_UNSERVED = Unserved(
    ("chat_template", only(), "the model's own is used: leave it out"),
    ("mm_processor_kwargs", only({}), "prompts are text: leave it out"),
)
_tokenize_decoder = msgspec.json.Decoder(TokenizeCall)
_FIELDS = frozenset(TokenizeCall.__struct_fields__)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeCall)


def decode_tokenize(body: bytes) -> tuple[TokenizeCall, Prompt, str]:
    """Decode the body of /tokenize; returns also the prompt, and the beginning of the answer that it ends with.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    call = decode_json(_tokenize_decoder, body)
    _UNSERVED.refuse(call, checked_field_names(body, _FIELDS))
    if (call.prompt is None) == (call.messages is None):
        raise InvalidRequest("send either `prompt` or `messages`", param="prompt")
    if call.messages is None:
        return call, TextPrompt(call.prompt or ""), ""
    if call.add_special_tokens:
        raise InvalidRequest(
            "`add_special_tokens`: a chat's template sets them: leave it out", param="add_special_tokens"
        )
    messages = [message_of(message, index) for index, message in enumerate(call.messages)]
    if not messages:
        raise InvalidRequest("`messages` is empty: send at least one message", param="messages")
    template_kwargs = template_kwargs_of(call.chat_template_kwargs)
    tools = tools_of(call.tools, call.tool_choice)
    if not call.continue_final_message:
        return call, ChatPrompt(tuple(messages), tools, template_kwargs=template_kwargs), ""
    if call.add_generation_prompt or messages[-1].role != "assistant" or len(messages) == 1:
        raise InvalidRequest(
            "`continue_final_message`: true needs `add_generation_prompt`: false, and a last message of role "
            "`assistant` behind others",
            param="continue_final_message",
        )
    return call, ChatPrompt(tuple(messages[:-1]), tools, template_kwargs=template_kwargs), messages[-1].content


def decode_detokenize(body: bytes) -> DetokenizeCall:
    """Decode the body of /detokenize.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    call = decode_json(_detokenize_decoder, body)
    refuse_fields(body, frozenset(DetokenizeCall.__struct_fields__))
    token_ids(call.tokens, "tokens", MAX_DETOKENIZED)
    return call


def model_of_query(query: bytes) -> str | None:
    """Return the `model` that a query names, None where it names none.

    Raises:
        InvalidRequest: it names more than one, or none that could be a model's.
    """
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"the query has more than {MAX_FIELDS} parameters") from None
    named = [value for name, value in pairs if name == "model"]
    if len(named) > 1 or not all(1 <= len(name) <= 256 for name in named):
        raise InvalidRequest("`model`: name one model in the query, in at most 256 characters", param="model")
    return named[0] if named else None


def encode_tokens(tokens: Sequence[int], max_model_len: int, texts: Sequence[str] | None) -> bytes:
    """Return the reply of /tokenize.

    Args:
        max_model_len: the longest window of the model here, in tokens.
        texts: each token as the model's files write it, where that was asked for.
    """
    return orjson.dumps(
        {"count": len(tokens), "max_model_len": max_model_len, "tokens": list(tokens), "token_strs": texts}
    )


def encode_tokenizer(facts: TokenizerFacts, max_model_len: int) -> bytes:
    """Return the reply of /tokenizer_info: the names are those of Hugging Face's `tokenizer_config.json`.

    Args:
        max_model_len: the longest window of the model here, in tokens.
    """
    told: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # what reads any `tokenizer.json`
        "bos_token": facts.bos_token,
        "eos_token": facts.eos_token,
        "add_bos_token": facts.adds_bos,
        "model_max_length": max_model_len,
    }
    return orjson.dumps(told if facts.chat_template is None else {**told, "chat_template": facts.chat_template})


def encode_text(text: str) -> bytes:
    """Return the reply of /detokenize."""
    return orjson.dumps({"prompt": text})
