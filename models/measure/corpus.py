"""The texts that scales are calibrated on, and the held-out ones that quality is measured on; they share nothing.

`calibration.jsonl` and `heldout.jsonl` are chats whose last answer SmolLM2-135M-Instruct gave in float32, greedily;
the held-out text is prose written for this project, the Apache licence, and documentation of Python's own library.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path

import msgspec

from models.graph.artifact import digest_of
from models.text.chat import PromptEncoder
from router.base.errors import ArtifactError
from router.values.request import ChatPrompt, Message

_FOLDER = Path(__file__).parent / "calibration"
_LIBRARY = ("random", "json", "decimal", "heapq", "difflib", "argparse", "pathlib", "subprocess", "threading")


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """One chat; `complete` says that the last answer ended by itself."""

    messages: list[Message]
    complete: bool


@dataclass(frozen=True)
class Chat:
    """A prompt and the reference answer to it, as token ids; the answer ends with the end-of-turn token if it did."""

    question: str
    prompt_ids: list[int]
    answer_ids: list[int]


def calibration_digest() -> str:
    """What the calibration depends on, as a part of a recipe."""
    return digest_of([(_FOLDER / "calibration.jsonl").read_bytes()])


def calibration_chats(encoder: PromptEncoder) -> list[Chat]:
    """The chats that set the scales."""
    return _chats(_FOLDER / "calibration.jsonl", encoder)


def heldout_chats(encoder: PromptEncoder) -> list[Chat]:
    """Chats that no scale was made from."""
    return _chats(_FOLDER / "heldout.jsonl", encoder)


def heldout_chunks(encoder: PromptEncoder, chunk_tokens: int = 512, limit_tokens: int = 8704) -> list[list[int]]:
    """Held-out text in chunks of `chunk_tokens`, each preceded by the model's first token where it has one."""
    bos = encoder.tokenizer.bos_id
    begin = [bos] if encoder.prepend_bos and bos is not None else []
    ids = encoder.tokenizer.encode((_FOLDER / "heldout_text.txt").read_text(encoding="utf-8"))
    for module in _LIBRARY:
        if len(ids) >= limit_tokens:
            break
        ids += encoder.tokenizer.encode(_documentation(module))
    step = chunk_tokens - len(begin)
    chunks = [begin + ids[at : at + step] for at in range(0, min(len(ids), limit_tokens), step)]
    return [chunk for chunk in chunks if len(chunk) == chunk_tokens]


def _chats(path: Path, encoder: PromptEncoder) -> list[Chat]:
    if encoder.template is None:
        raise ArtifactError("this model has no chat template, and INT8 scales are calibrated on chats")
    end = encoder.tokenizer.eos_id
    chats = []
    for line in path.read_bytes().splitlines():
        row = msgspec.json.decode(line, type=_Row)
        *turns, answer = row.messages
        prompt = encoder.encode(ChatPrompt(messages=tuple(turns)))
        reply = encoder.tokenizer.encode(answer.content)
        if row.complete and end is not None:
            reply.append(end)
        chats.append(Chat(turns[-1].content, prompt, reply))
    return chats


def _documentation(module_name: str) -> str:
    module = importlib.import_module(module_name)
    parts = [module.__doc__]
    for name, member in sorted(vars(module).items()):
        if not name.startswith("_") and getattr(member, "__module__", None) == module_name:
            parts.append(inspect.getdoc(member))
            if inspect.isclass(member):
                parts += [inspect.getdoc(method) for _, method in sorted(vars(member).items()) if callable(method)]
    return "\n\n".join(part for part in parts if part) + "\n\n"
