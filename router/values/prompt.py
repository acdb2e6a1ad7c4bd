"""What a caller gives a model to answer: prompts, and how long they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from router.values.feature import NOTHING, Feature
from router.values.task import Call
from router.values.tool_calls import ToolCall, Tools


class MediaPart(msgspec.Struct, frozen=True):
    """An image or a sound in a message.

    Attributes:
        kind: `Feature.IMAGES` or `Feature.AUDIO`.
        written: the part as JSON, as OpenAI's API has it.
        link: from where the server that runs the model is to fetch it; empty where it is in `written`.
    """

    kind: Feature
    written: bytes
    link: str = ""


class Message(msgspec.Struct, frozen=True):
    """One chat turn; `content` is plain text (text parts are joined by the codec).

    Attributes:
        parts: of a turn with images or sounds all of its parts in order, its texts among them.
        tool_calls: what an assistant's turn called.
        call_id: whose result a turn of the role `tool` is.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    parts: tuple[str | MediaPart, ...] = ()


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation, to be rendered by the chat template of the model that serves it.

    Attributes:
        tools: what the answer may call; None where the request has none.
        media: what of its turns is no text.
        template_kwargs: further variables of that template, as a JSON object; empty where there are none.
    """

    messages: tuple[Message, ...]
    tools: Tools | None = None
    media: frozenset[Feature] = NOTHING
    template_kwargs: bytes = b""

    @property
    def uses_tools(self) -> bool:
        """Whether it takes a server that knows of tools."""
        return self.tools is not None or any(message.tool_calls or message.role == "tool" for message in self.messages)


class TextPrompt(msgspec.Struct, frozen=True):
    """Raw text to continue."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True):
    """Token ids to continue; valid only for models that share the tokenizer."""

    token_ids: tuple[int, ...]


class TokenizerFacts(msgspec.Struct, frozen=True):
    """What clients that write prompts by themselves have to know of a model's tokenizer.

    Attributes:
        bos_token, eos_token: as the model's files write them; None where it has none.
        adds_bos: raw text is preceded by `bos_token`.
        chat_template: jinja2, None of a model that takes no chats.
    """

    bos_token: str | None
    eos_token: str | None
    adds_bos: bool
    chat_template: str | None


Prompt = ChatPrompt | TextPrompt | TokenPrompt
Input = Prompt | Call

IN_THREAD_CHARS = 20_000
"""Prompts from this size on take long enough to encode that a worker thread should do it, not the event loop."""
_MESSAGE_CHARS = 32  # what an empty message costs the template, as text


def texts_of(prompt: ChatPrompt) -> list[str]:
    """Return the texts of a conversation: what was said and called, and the tools."""
    texts: list[str] = []
    for message in prompt.messages:
        texts.append(message.content)
        if message.tool_calls:
            texts += [call.name + call.arguments for call in message.tool_calls]
    if prompt.tools is not None:
        texts += [tool.name + tool.description + tool.parameters for tool in prompt.tools.offered]
    return texts


def size_chars(prompt: Input) -> int:
    """Return how much text there is to encode; 0 for token ids, and for calls, which their replica encodes."""
    if isinstance(prompt, ChatPrompt):
        texts = texts_of(prompt)
        return sum(map(len, texts)) + _MESSAGE_CHARS * len(texts)
    return len(prompt.text) if isinstance(prompt, TextPrompt) else 0


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A rendered prompt as token ids, so that what was encoded to be counted is not encoded again to be served.

    Attributes:
        encoder: what encoded it; only a replica with the very same one takes the ids.
    """

    token_ids: tuple[int, ...]
    encoder: object


@dataclass(frozen=True, slots=True)
class PromptSize:
    """How long a rendered prompt is, in tokens.

    Attributes:
        tokens: counted with the tokenizer of the model, or else the likeliest figure.
        slack: by how much that figure may be too high; 0 where it was counted.
        window: what one window has to hold where that is not all of it: the longest input of a call, at the least.
        encoded: what was counted, if that was this prompt alone.
    """

    tokens: int
    slack: int = 0
    window: int | None = None
    encoded: EncodedPrompt | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, token_ids: Sequence[int], encoder: object) -> PromptSize:
        return cls(len(token_ids), encoded=EncodedPrompt(tuple(token_ids), encoder))

    def __add__(self, other: PromptSize) -> PromptSize:
        return PromptSize(self.tokens + other.tokens, self.slack + other.slack)
