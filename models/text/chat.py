"""Conversations to prompts: the model's own chat template, rendered in a sandbox, then tokenized."""

from __future__ import annotations

import datetime as dt
import functools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.formats.config import read_json
from models.text.tokenizer import Tokenizer
from models.text.tools.format import ToolFormat, in_own_words
from models.text.tools.prompted import function_of, in_plain_messages
from models.text.tools.registry import format_of, open_format
from router.base.errors import ArtifactError, ContextTooLong, InvalidRequest
from router.values.prompt import ChatPrompt, Message, Prompt, TextPrompt, TokenizerFacts, TokenPrompt, texts_of

TEMPLATE_FILE = "chat_template.jinja"
_NORMALISED = 2  # Unicode normalisation (NFC) can join up to two characters into a byte's worth of text each
_MARK = secrets.token_hex(16)
"""Stands inside of special tokens that are text; nobody outside of this process can write it."""


class ChatTemplate:
    """A model's chat template (jinja2, in the dialect that Hugging Face's templates are written in).

    Attributes:
        source: the template's text.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        """Compile the template.

        Args:
            bos, eos: what `bos_token` and `eos_token` stand for in it.

        Raises:
            ArtifactError: the template's syntax is wrong.
        """
        self.source = source
        self._specials = {"bos_token": bos, "eos_token": eos}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ArtifactError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Read the template that belongs to a GGUF file, a Hugging Face directory or an artifact; None without one.

        Raises:
            ArtifactError: a file is damaged, or the template's syntax is wrong.
        """
        source = _source_in_directory(path) if path.is_dir() else _source_in_gguf(path)
        if source is None:
            return None
        bos = tokenizer.token_of(tokenizer.bos_id) or ""
        eos = tokenizer.token_of(tokenizer.eos_id) or ""
        try:
            return cls(source, bos, eos)
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error.message}; pull the model again, or correct its template") from error

    def save(self, directory: Path) -> None:
        """Write `chat_template.jinja` into `directory`."""
        (directory / TEMPLATE_FILE).write_text(self.source, encoding="utf-8")

    def render(
        self,
        messages: Sequence[Message | dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
        continuation: str = "",
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        Args:
            messages: plain turns, or objects as templates take them.
            tools: functions as templates take them.
            add_generation_prompt: end with the opening of the assistant's turn.
            continuation: the beginning of the assistant's answer, to be continued: put after that opening.
            variables: what else the caller tells the template.

        Raises:
            InvalidRequest: the template refuses the messages (a role, an order), or fails on them.
        """
        try:
            text = self._template.render(
                dict(variables or {}),
                messages=[_plain(message) if isinstance(message, Message) else message for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt or bool(continuation),
                **self._specials,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            by_variables = variables and not isinstance(error, jinja2.TemplateError)  # those speak of turns as a rule
            param = "chat_template_kwargs" if by_variables else "messages"
            raise InvalidRequest(f"the model's chat template refuses these `{param}`: {error}", param=param) from error
        return text + continuation


class PromptEncoder:
    """Turns any `Prompt` into token ids, the same way wherever it is counted or served.

    Attributes:
        tokenizer: the model's.
        template: the model's; None for a base model, which then takes no chat.
        prepend_bos: raw text is preceded by the first token of the model's sequences.
        tools: how the model writes calls of tools, or is asked to.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, prepend_bos: bool | None = None) -> None:
        """Join the two.

        Args:
            prepend_bos: the catalogue's word on it; None leaves it to the model's files (`tokenizer.adds_bos`).
        """
        self.tokenizer = tokenizer
        self.template = template
        written = None if template is None else format_of(template.source)
        self._knows_tools = written is not None
        self.tools = open_format(written or "hermes")
        wanted = tokenizer.adds_bos if prepend_bos is None else prepend_bos
        self.prepend_bos = wanted and tokenizer.bos_id is not None

    @classmethod
    def load(cls, path: Path, *, prepend_bos: bool | None = None) -> PromptEncoder:
        """Read tokenizer and template from a GGUF file, a Hugging Face directory or an artifact directory.

        Raises:
            ArtifactError: a file is missing or damaged.
        """
        tokenizer = Tokenizer.load(path)
        return cls(tokenizer, ChatTemplate.load(path, tokenizer), prepend_bos=prepend_bos)

    def refuse_hopeless(self, prompt: Prompt, model: str, window_tokens: int) -> None:
        """Refuse what cannot fit whatever it says, before seconds and hundreds of megabytes go into its tokens.

        A token is never longer than the vocabulary's longest, and a turn of a chat never less than one token.

        Args:
            model: what the caller named.
            window_tokens: the longest window that may serve it.

        Raises:
            ContextTooLong: the prompt is surely longer than that.
        """
        if isinstance(prompt, TokenPrompt):
            if len(prompt.token_ids) > window_tokens:
                raise ContextTooLong.of(
                    window_tokens,
                    f"the prompt has {len(prompt.token_ids)} tokens, and no window of `{model}` here is larger",
                    param="prompt",
                )
            return
        is_chat = isinstance(prompt, ChatPrompt)
        texts = texts_of(prompt) if isinstance(prompt, ChatPrompt) else [prompt.text]
        turns = len(prompt.messages) if isinstance(prompt, ChatPrompt) else 0
        characters = sum(map(len, texts))
        limit = _NORMALISED * window_tokens
        if turns <= window_tokens and (characters <= limit or characters <= limit * self._longest_token):
            return
        what = f"{turns} messages" if turns > window_tokens else f"{characters} characters"
        raise ContextTooLong.of(
            window_tokens,
            f"the prompt has {what}, and no window of `{model}` here is larger",
            param="messages" if is_chat else "prompt",
        )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the vocabulary's longest token."""
        tokenizer = self.tokenizer
        return max(len(tokenizer.token_of(token) or "") for token in range(tokenizer.vocab_size))

    def encode(self, prompt: Prompt, continuation: str = "") -> list[int]:
        """Return the ids to prefill. Special tokens written in raw text become their ids; those in messages do not.

        Args:
            continuation: text of the answer that was emitted already; the ids end with it.

        Raises:
            InvalidRequest: the template refuses the messages, the model has no template, or a token id is unknown.
        """
        if isinstance(prompt, ChatPrompt):
            return self._chat(self._template(), prompt, continuation)
        if isinstance(prompt, TextPrompt):
            return self._with_bos(self.tokenizer.encode(prompt.text + continuation))
        self._refuse_unknown(prompt.token_ids, "prompt")
        return [*prompt.token_ids, *(self.tokenizer.encode(continuation) if continuation else ())]

    def tokenize(
        self, prompt: Prompt, *, special_tokens: bool = True, generation_prompt: bool = True, continuation: str = ""
    ) -> list[int]:
        """Return the ids of a prompt, other than as it is served where that is asked for.

        Args:
            special_tokens: precede raw text by the first token of the model's sequences, where it has one.
            generation_prompt: end a conversation with the opening of the assistant's turn.
            continuation: see `encode`.

        Raises:
            InvalidRequest: see `encode`.
        """
        if isinstance(prompt, TextPrompt) and not special_tokens:
            return self.tokenizer.encode(prompt.text + continuation)
        if isinstance(prompt, ChatPrompt) and not (generation_prompt or continuation):
            return self._chat(self._template(), prompt, "", generation_prompt=False)
        return self.encode(prompt, continuation)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens.

        Raises:
            InvalidRequest: an id outside of the vocabulary.
        """
        self._refuse_unknown(token_ids, "tokens")
        return self.tokenizer.decode(token_ids)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each id as the model's files write it; an unknown one is empty."""
        return [self.tokenizer.token_of(token) or "" for token in token_ids]

    def facts(self) -> TokenizerFacts:
        """Return the special tokens and the chat template, as a client needs them that renders chats by itself."""
        tokenizer, template = self.tokenizer, self.template
        return TokenizerFacts(
            bos_token=tokenizer.token_of(tokenizer.bos_id),
            eos_token=tokenizer.token_of(tokenizer.eos_id),
            adds_bos=self.prepend_bos,
            chat_template=None if template is None else template.source,
        )

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; send its prompt to /v1/completions", param="messages"
            )
        return self.template

    def _refuse_unknown(self, token_ids: Sequence[int], param: str) -> None:
        unknown = next((token for token in token_ids if not 0 <= token < self.tokenizer.vocab_size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"token id {unknown} is outside of the vocabulary of {self.tokenizer.vocab_size}", param=param
            )

    def render(self, prompt: ChatPrompt, continuation: str = "") -> str:
        """Return a conversation as text, for a server that takes text alone and adds the first token by itself.

        Such a server makes special tokens of whatever looks like one. Text that does is refused: it could close its own
        turn and speak as the system.

        Args:
            continuation: text of the answer that was emitted already; the text ends with it.

        Raises:
            InvalidRequest: the template refuses the messages, the model has none, or they hold special tokens.
        """
        template = self._template()
        mark = self.tokenizer.mark_special
        variables = prompt.template_kwargs.decode()
        turns = [part for message in prompt.messages for part in (message.role, message.content)]
        for text in [*turns, continuation, variables]:
            if mark(text, _MARK) != text:
                raise InvalidRequest(
                    "a server that takes text alone cannot tell special tokens of the model from text that is spelled "
                    f"like them, as this is: {text[:80]!r}",
                    param="messages",
                )
        told = json.loads(variables) if variables else None
        rendered = template.render(prompt.messages, continuation=continuation, variables=told)
        first = self.tokenizer.token_of(self.tokenizer.bos_id) if self.prepend_bos else None
        return rendered.removeprefix(first or "")

    def _chat(
        self, template: ChatTemplate, prompt: ChatPrompt, continuation: str, *, generation_prompt: bool = True
    ) -> list[int]:
        """Encode a conversation: special tokens come from the template alone.

        One that somebody wrote into a message stays the text it is, or a user could close his own turn and speak as
        the system. The one that opens calls of tools is the model's own word in what is continued.
        """
        tools = prompt.tools if prompt.tools is not None and prompt.tools.callable else None
        messages, told = prompt.messages, [function_of(tool) for tool in tools.offered] if tools is not None else []
        if prompt.uses_tools and not self._knows_tools:
            messages, told = tuple(in_plain_messages(messages, tools, self.tools)), []
        if tools is not None and continuation:
            continuation = in_own_words(self.tools, continuation)
        opener = self.tools.style.opener
        begun = [continuation]
        if tools is not None and self.tokenizer.special_id(opener) is not None:
            begun = continuation.split(opener)
        mark = functools.partial(self.tokenizer.mark_special, mark=_MARK)
        names = {call.call_id: call.name for message in messages for call in message.tool_calls}
        text = template.render(
            [_turn(message, mark, self.tools, names) for message in messages],
            tools=[_marked(function, mark) for function in told],
            add_generation_prompt=generation_prompt,
            continuation=opener.join(map(mark, begun)),
            variables=_marked(json.loads(prompt.template_kwargs), mark) if prompt.template_kwargs else None,
        )
        return [token for piece in text.split(_MARK) for token in self.tokenizer.encode(piece)]

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_id
        if not self.prepend_bos or bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids]


def _plain(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


def _turn(message: Message, mark: Callable[[str], str], form: ToolFormat, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a turn as templates take it, all text of it marked."""
    turn: dict[str, Any] = {"role": mark(message.role), "content": mark(message.content)}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": mark(form.call_id(call.call_id)),
                "function": {"name": mark(call.name), "arguments": _marked(json.loads(call.arguments), mark)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        turn |= {"tool_call_id": mark(form.call_id(message.call_id)), "name": mark(names.get(message.call_id, ""))}
    return turn


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    """Return a JSON value with every text in it marked."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(key): _marked(item, mark) for key, item in value.items()}
    return [_marked(item, mark) for item in value] if isinstance(value, list) else value


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 — jinja2's own declaration of the attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _source_in_gguf(path: Path) -> str | None:
    from models.formats.gguf import GgufFile  # noqa: PLC0415 — artifact directories need no GGUF reader

    source = GgufFile(path).metadata.get("tokenizer.chat_template")
    return None if source is None else str(source)


def _source_in_directory(directory: Path) -> str | None:
    file = directory / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    value: Any = read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(value, list):  # several named ones
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}.get("default")
    if value is not None and not isinstance(value, str):
        raise ArtifactError(f"{config}: `chat_template` is a {type(value).__name__}, not a string")
    return value


def _to_json(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    """The local date, as templates that mention today's date expect."""
    return dt.datetime.now().astimezone().strftime(pattern)
