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


def system_of(system: str | list[Block] | None, at: str = "system") -> list[Message]:
    """Return the instructions as a turn; none where there are none.

    Raises:
        InvalidRequest: naming the block at fault.
    """
    if system is None or isinstance(system, str):
        return [Message("system", system)] if system else []
    texts = [_text_of(block, f"{at}[{index}]") for index, block in enumerate(system)]
    text = _BETWEEN.join(text for text in texts if text and not text.startswith(_BILLING))
    return [Message("system", text)] if text else []


def chat_of(turns: Sequence[Turn]) -> list[Message]:
    """Return the turns of a chat.

    Raises:
        InvalidRequest: naming the block at fault.
    """
    chat = _Chat()
    heard_last = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=-1)
    for index, turn in enumerate(turns):
        blocks = [Block("text", turn.content)] if isinstance(turn.content, str) else turn.content
        where = f"messages[{index}]"
        at = f"{where}.content"
        if turn.role == "user":
            chat.hear(*_user(blocks, at))
        elif turn.role == "assistant":
            chat.answer(*_assistant(blocks, at))
        elif turn.role == "system":
            said = system_of(blocks, at)
            if turn.clear_at != "next_user_message" or index > heard_last:
                chat.add(said)
        else:
            raise InvalidRequest(
                f"`{where}.role`: got `{turn.role[:40]}`, expected one of user, assistant, system",
                param=f"{where}.role",
            )
    return chat.messages()


class _Chat:
    """A chat that grows: what one side says in several turns is put together once, when another one speaks."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._heard: list[Part] | None = None  # of the user's turn that is open
        self._answered: tuple[list[str], list[ToolCall]] | None = None  # of the assistant's
        self._plain = True  # the open turn of the user is text alone

    def add(self, messages: Sequence[Message]) -> None:
        if messages:
            self._close()
            self._messages += messages

    def hear(self, results: Sequence[Message], parts: Sequence[Part]) -> None:
        self.add(results)
        if results and not parts:
            return
        if self._heard is None:
            self._close()
            self._heard, self._plain = [], True
        if self._plain and not all(isinstance(part, str) for part in parts):
            before = _joined([part for part in self._heard if isinstance(part, str)])
            self._heard, self._plain = [before] if before else [], False
        self._heard += parts

    def answer(self, texts: Sequence[str], calls: Sequence[ToolCall]) -> None:
        if self._answered is None:
            self._close()
            self._answered = [], []
        self._answered[0].extend(texts)
        self._answered[1].extend(calls)

    def messages(self) -> list[Message]:
        self._close()
        return self._messages

    def _close(self) -> None:
        if self._heard is not None:
            text = _joined([part for part in self._heard if isinstance(part, str)])
            self._messages.append(Message("user", text, parts=() if self._plain else tuple(self._heard)))
        if self._answered is not None:
            texts, calls = self._answered
            self._messages.append(Message("assistant", "".join(texts), tuple(calls)))
        self._heard = self._answered = None


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


def _assistant(blocks: Sequence[Block], at: str) -> tuple[list[str], list[ToolCall]]:
    texts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        where = f"{at}[{index}]"
        if block.type == "tool_use":
            # As models write it: what a cache holds of the answer is then found again, as a rule.
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            calls.append(ToolCall(_given(block.id, where, "id"), _given(block.name, where, "name"), arguments))
        elif block.type not in _THOUGHTS:  # which are no part of a conversation
            texts.append(_text_of(block, where))
    return texts, calls


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
        content = [Block("text", block.content)] if isinstance(block.content, str) else block.content or []
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
