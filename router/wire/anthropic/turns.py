"""Turns of Anthropic's API into those of a chat: results of tools are turns of their own, turns of one role are one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.base.errors import InvalidRequest
from router.values.prompt import MediaPart, Message
from router.values.tool_calls import ToolCall
from router.wire.anthropic.fields import Block, Source, Turn
from router.wire.openai.media import RawImage, image_of

_BETWEEN = "\n"
"""Stands between blocks, which are pieces of their own; those of an answer are cut out of one text."""
_THOUGHTS = ("thinking", "redacted_thinking")
_BILLING = "x-anthropic-billing-header:"
"""What Claude Code puts in front of its instructions for Anthropic's own servers: it differs from request to request,
so that no KV cache would ever hold what follows it."""
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

Part = str | MediaPart


def system_of(system: str | list[Block] | None) -> list[Message]:
    """Return the instructions as a turn; none where there are none.

    Raises:
        InvalidRequest: naming the block at fault.
    """
    if system is None or isinstance(system, str):
        return [Message("system", system)] if system else []
    texts = [_text_of(block, f"system[{index}]") for index, block in enumerate(system)]
    text = _BETWEEN.join(text for text in texts if text and not text.startswith(_BILLING))
    return [Message("system", text)] if text else []


def add_turn(turn: Turn, at: str, messages: list[Message]) -> None:
    """Add a turn to a chat.

    Raises:
        InvalidRequest: naming the block at fault.
    """
    blocks = [Block("text", turn.content)] if isinstance(turn.content, str) else turn.content
    at = f"{at}.content"
    if turn.role == "user":
        results, parts = _user(blocks, at)
        messages += results
        _add_user(parts, messages, bare=not results)
    elif turn.role == "assistant":
        _add_assistant(blocks, at, messages)
    elif turn.role == "system":
        messages += system_of(blocks)
    else:
        where = at.removesuffix("content") + "role"
        raise InvalidRequest(f"`{where}`: got `{turn.role[:40]}`, expected one of user, assistant, system", param=where)


def _user(blocks: Sequence[Block], at: str) -> tuple[list[Message], list[Part]]:
    """Return the results of tools, which answer the turn before, and what the user says.

    What is no text in a result is shown behind it: a turn of the role `tool` is text to every model.
    """
    results: list[Message] = []
    shown: list[Part] = []
    said: list[Part] = []
    for index, block in enumerate(blocks):
        where = f"{at}[{index}]"
        if block.type == "tool_result":
            parts = _result(block, where)
            text = _joined([part for part in parts if isinstance(part, str)])
            results.append(Message("tool", text or _came_to(block), call_id=_given(block.tool_use_id, where)))
            shown += [part for part in parts if not isinstance(part, str)]
        else:
            said += _parts(block, where)
    return results, shown + said


def _add_user(parts: list[Part], messages: list[Message], *, bare: bool) -> None:
    """Add what a user says: to the turn before where that is the user's too, as this API has it."""
    if not parts and not bare:
        return
    before = messages[-1] if messages else None
    if before is not None and before.role == "user":
        messages.pop()
        parts = [*(before.parts or ([before.content] if before.content else [])), *parts]
    texts = [part for part in parts if isinstance(part, str)]
    messages.append(Message("user", _joined(texts), parts=() if len(texts) == len(parts) else tuple(parts)))


def _add_assistant(blocks: Sequence[Block], at: str, messages: list[Message]) -> None:
    text: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        where = f"{at}[{index}]"
        if block.type == "tool_use":
            # As models write it: what a cache holds of the answer is then found again, as a rule.
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            calls.append(ToolCall(_given(block.id, where, "id"), _given(block.name, where, "name"), arguments))
        elif block.type not in _THOUGHTS:  # which are no part of a conversation
            text.append(_text_of(block, where))
    before = messages[-1] if messages else None
    if before is not None and before.role == "assistant":
        messages.pop()
        messages.append(Message("assistant", before.content + "".join(text), (*before.tool_calls, *calls)))
    else:
        messages.append(Message("assistant", "".join(text), tuple(calls)))


def _result(block: Block, at: str) -> list[Part]:
    if block.content is None or isinstance(block.content, str):
        return [block.content] if block.content else []
    return [part for index, one in enumerate(block.content) for part in _parts(one, f"{at}.content[{index}]")]


def _came_to(block: Block) -> str:
    return "error" if block.is_error else ""


def _parts(block: Block, at: str) -> list[Part]:
    """Return what a block shows."""
    if block.type == "image":
        return [_image(block.source, f"{at}.source")]
    if block.type == "document":
        return [_document(block, f"{at}.source")]
    if block.type == "search_result":
        content = block.content if isinstance(block.content, list) else []
        texts = [_text_of(one, f"{at}.content[{index}]") for index, one in enumerate(content)]
        source = block.source if isinstance(block.source, str) else None
        return [_joined([block.title, source, *texts])]
    if block.type in _THOUGHTS:
        return []
    return [_text_of(block, at)]


def _image(source: Source | str | None, at: str) -> MediaPart:
    if isinstance(source, Source) and source.type == "base64":
        if source.media_type not in _IMAGE_TYPES:
            raise InvalidRequest(f"`{at}.media_type`: expected one of {', '.join(_IMAGE_TYPES)}", param=at)
        return image_of(RawImage(f"data:{source.media_type};base64,{source.data or ''}"), at)
    if isinstance(source, Source) and source.type == "url":
        return image_of(RawImage(source.url or ""), at)
    raise InvalidRequest(f"`{at}`: send an image as `base64` or `url`: no files are kept for this API", param=at)


def _document(block: Block, at: str) -> str:
    """Return a document of text; others would have to be read by somebody."""
    source, said = block.source, []
    if isinstance(source, Source) and source.type == "text" and source.data is not None:
        said = [source.data]
    elif isinstance(source, Source) and source.type == "content" and source.content is not None:
        inner = [Block("text", source.content)] if isinstance(source.content, str) else source.content
        said = [_text_of(one, f"{at}.content[{index}]") for index, one in enumerate(inner)]
    else:
        raise InvalidRequest(
            f"`{at}`: documents are served as text alone (a `source` of type `text`, or `content` with text blocks): "
            "send the text of a PDF",
            param=at,
        )
    return _joined([block.title, block.context, *said])


def _text_of(block: Block, at: str) -> str:
    if block.type != "text":
        raise InvalidRequest(
            f"`{at}`: a block of type `{block.type[:40]}` is not served here: send `text`; from the user `image`, "
            "`document`, `search_result` and `tool_result` too, from the assistant `tool_use` and `thinking`",
            param=at,
        )
    return _given(block.text, at, "text", empty=True)


def _given(value: str | None, at: str, field: str = "tool_use_id", *, empty: bool = False) -> str:
    if value is None or not (value or empty):
        raise InvalidRequest(f"`{at}.{field}` is required", param=f"{at}.{field}")
    return value


def _joined(texts: Sequence[str | None]) -> str:
    return _BETWEEN.join(text for text in texts if text)
