"""Text to token ids and back. Byte-level BPE (GPT-2's alphabet).

A `Tokenizer` is built from a GGUF file's metadata, or from a directory with a `tokenizer.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from models.formats.config import eos_ids_of, gguf_eos_ids, read_json
from router.base.errors import ArtifactError, InvalidRequest
from router.base.host import trim_heap

if TYPE_CHECKING:
    import llguidance

    from models.formats.gguf import GgufFile

TOKENIZER_FILE = "tokenizer.json"
MANIFEST_FILE = "manifest.json"

# What a word is before merges, by the GGUF metadata's `tokenizer.ggml.pre`.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED = 3, 4
# Tokens that a mask allows or forbids all at once where it can, beside what llguidance has for strings in JSON: words.
_WORD_SLICES = (r" [a-z]{1,10}", r"[a-z]{1,10}")


class Tokenizer:
    """A byte-level BPE tokenizer and the ids that end a turn.

    Attributes:
        eos_ids: any of these ends generation.
        eos_id: the one that the model's files call the end-of-sequence token, None if they name none.
        bos_id: the first token of every sequence the model was trained on, None if it has none.
        adds_bos: raw text is to be preceded by `bos_id`, as the model's own files say.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_ids: Iterable[int], bos_id: int | None, adds_bos: bool
    ) -> None:
        """Wrap a backend.

        Args:
            eos_ids: the first is the end-of-sequence token, the others end a turn too.

        Raises:
            ArtifactError: its decoder is not byte-level.
        """
        kind = json.loads(backend.decoder.__getstate__())["type"] if backend.decoder else None
        if kind != "ByteLevel":
            raise ArtifactError(f"the tokenizer's decoder is {kind}; only byte-level BPE (ByteLevel) can be served")
        self._backend = backend
        self._pieces: dict[int, bytes] = {}
        trim_heap()  # the parser's scratch memory: 14 MB for 49,152 tokens
        specials = {token: added for token, added in backend.get_added_tokens_decoder().items() if added.special}
        self._special = frozenset(specials)
        written = sorted((re.escape(added.content) for added in specials.values()), key=len, reverse=True)
        self._special_text = re.compile("|".join(written)) if written else None
        ordered = tuple(eos_ids)
        self.eos_ids = frozenset(ordered)
        self.eos_id = ordered[0] if ordered else None
        self.bos_id = bos_id
        self.adds_bos = adds_bos and bos_id is not None

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """Build it from a GGUF file's metadata.

        Raises:
            ArtifactError: the file is damaged or its tokenizer is of an unknown kind.
        """
        from models.formats.gguf import GgufFile  # noqa: PLC0415 — artifact directories need no GGUF reader

        file = GgufFile(path)
        data = file.metadata
        bos = data.get("tokenizer.ggml.bos_token_id")
        return cls(
            _backend_from_gguf(file),
            eos_ids=gguf_eos_ids(data),
            bos_id=None if bos is None else int(bos),
            adds_bos=bool(data.get("tokenizer.ggml.add_bos_token", False)),
        )

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read `tokenizer.json`; ids that end a turn come from the configuration files beside it.

        Those are an artifact's `manifest.json`, and Hugging Face's `generation_config.json`, `config.json` and
        `tokenizer_config.json`, as far as they exist.

        Raises:
            ArtifactError: a file is missing or damaged.
        """
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise ArtifactError(f"{directory}: has no {TOKENIZER_FILE}; pull the model again")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            if type(error) is not Exception:
                raise
            raise ArtifactError(f"{path}: not a tokenizer: {error}; pull the model again") from error
        manifest = _json_beside(directory, MANIFEST_FILE)
        config = _json_beside(directory, "config.json")
        named = _json_beside(directory, "tokenizer_config.json")
        primary = _id_named(backend, named.get("eos_token"))
        eos = [*eos_ids_of(directory, config), *manifest.get("eos_token_ids", ())]
        bos = _id_named(backend, named.get("bos_token"))
        bos = manifest.get("bos_token_id", config.get("bos_token_id") if bos is None else bos)
        adds = manifest.get("prepend_bos", named.get("add_bos_token"))
        if adds is None:  # no file says so: does the post-processor do it?
            adds = bos is not None and backend.encode("").ids[:1] == [bos]
        eos = eos if primary is None else [primary, *eos]
        try:
            return cls(backend, eos_ids=eos, bos_id=bos, adds_bos=bool(adds))
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error.message}; choose another model") from error

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Build it from a GGUF file or a directory."""
        return cls.from_directory(path) if path.is_dir() else cls.from_gguf(path)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` into `directory`."""
        # Written here and not by the library, whose error on a full disk is no `OSError`.
        (directory / TOKENIZER_FILE).write_text(self._backend.to_str(pretty=False), encoding="utf-8")
        named = {
            "bos_token": self.token_of(self.bos_id),
            "eos_token": self.token_of(self.eos_id),
            "add_bos_token": self.adds_bos,
        }
        generation = {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids)}
        for name, tree in (("tokenizer_config.json", named), ("generation_config.json", generation)):
            (directory / name).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that stand for no text, as those which end a turn."""
        return self._special

    @property
    def vocab_size(self) -> int:
        """Number of known tokens; a model's embedding may be padded to more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens written in it become their ids, none is added.

        Raises:
            InvalidRequest: the text holds half a surrogate pair, which lenient JSON decoders let through.
        """
        try:
            # Not `encode`: it holds the interpreter's lock, so a long prompt would stop every thread of a server.
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise InvalidRequest(
                "the prompt holds half a surrogate pair; send valid Unicode", param="prompt"
            ) from error

    def mark_special(self, text: str, mark: str) -> str:
        """Return `text` with `mark` put into every special token that is written in it, after its first character.

        What is between the marks holds no special token any more: encoded piece by piece, all of it is plain text.
        """
        if self._special_text is None:
            return text
        return self._special_text.sub(lambda found: found[0][0] + mark + found[0][1:], text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, ids)).decode("utf-8", errors="replace")

    def piece(self, token_id: int) -> bytes:
        """Return the bytes one id stands for: empty for a special token or an id without a token."""
        known = self._pieces.get(token_id)
        if known is None:
            token = None if token_id in self._special else self._backend.id_to_token(token_id)
            known = self._pieces[token_id] = b"" if token is None else _token_bytes(token)
        return known

    def spelling(self, token_id: int) -> bytes:
        """Return the bytes of one id as they are told of: a special token's are its name."""
        return self.piece(token_id) or (self.token_of(token_id) or "").encode()

    def special_id(self, text: str) -> int | None:
        """Return the special token that is written so, None if there is none."""
        token = self._backend.token_to_id(text) if text else None
        return token if token in self._special else None

    def for_grammars(self) -> llguidance.LLTokenizer:
        """Return the vocabulary as llguidance takes it; a quarter of a second's work. See `models.text.grammar`.

        It is given the tokens, and asks this tokenizer: reading `tokenizer.json` again would make a second one. In
        steps, for each holds the interpreter's lock: all at once it stops every answer for a third of a second.
        """
        import llguidance  # noqa: PLC0415 (7 MB that only constrained requests need)

        words = llguidance.TokenizerWrapper(_Words(self))
        ends = sorted(self.eos_ids) or None
        whole = llguidance.LLTokenizer(words, n_vocab=self.vocab_size, eos_token=ends, slices=[])
        return whole.with_slices([*llguidance.LLTokenizer.general_slices(), *_WORD_SLICES])

    def token_of(self, token_id: int | None) -> str | None:
        """Return a token as its files write it (`<|im_end|>`), None for an unknown id."""
        return None if token_id is None else self._backend.id_to_token(token_id)


class _Words:
    """A tokenizer with the attributes that `llguidance.TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        self.tokens = [tokenizer.spelling(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = min(tokenizer.eos_ids, default=None)
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the 68 others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token is written as plain text
        return token.encode("utf-8")


def _backend_from_gguf(file: GgufFile) -> tokenizers.Tokenizer:
    data = file.metadata
    kind = data.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ArtifactError(f"{file.path}: its tokenizer is `{kind}`; only byte-level BPE (`gpt2`) can be served")
    pre = str(data.get("tokenizer.ggml.pre", "default"))
    try:
        tokens: list[str] = data["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in data["tokenizer.ggml.merges"]]
    except KeyError as error:
        raise ArtifactError(f"{file.path}: the GGUF metadata lack {error}") from error
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises a bare Exception
        if type(error) is not Exception:
            raise
        raise ArtifactError(f"{file.path}: its merges do not fit its tokens: {error}") from error
    backend.pre_tokenizer = _pre_tokenizer(pre, file.path)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    types: list[int] = data.get("tokenizer.ggml.token_type", [])
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        backend.add_tokens(
            [
                tokenizers.AddedToken(token, special=special, normalized=False)
                for token, kind_of_token in zip(tokens, types, strict=False)
                if kind_of_token == wanted
            ]
        )
    return backend


def _pre_tokenizer(pre: str, path: Path) -> Any:
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    words = {"llama-bpe": _LLAMA3_WORDS, "qwen2": _QWEN2_WORDS}.get(pre)
    if words is None:
        raise ArtifactError(f"{path}: pre-tokenizer `{pre}` is unknown; known: gpt-2, smollm, llama-bpe, qwen2")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _json_beside(directory: Path, name: str) -> dict[str, Any]:
    return read_json(directory / name) if (directory / name).is_file() else {}


def _id_named(backend: tokenizers.Tokenizer, token: object) -> int | None:
    """Return the id of a token named in tokenizer_config.json: a string, or an object with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None
