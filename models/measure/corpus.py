"""Three frozen data sets that share nothing, each a pair of files in `calibration/`, read from nowhere else.

    calibration   sets the scales                                      calibration.jsonl
    selection     chooses the rotation and gates what an artifact says  selection.jsonl, selection.txt
    test          gives every figure that is told                       test.jsonl, test.txt

The `.jsonl` files are chats whose last answer SmolLM2-135M-Instruct gave in float32, greedily, at most 128 tokens. The
texts were written for this project: prose, dialogue, code and documentation. `models/` chooses nothing by the test set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from models.graph.artifact import digest_of
from models.text.chat import PromptEncoder
from router.base.errors import ArtifactError
from router.values.prompt import ChatPrompt, Message

FOLDER = Path(__file__).parent / "calibration"

ChatSet = Literal["calibration", "selection", "test"]
TextSet = Literal["selection", "test"]


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


def digest(name: ChatSet) -> str:
    """Digest one data set, as a part of a recipe."""
    return digest_of([path.read_bytes() for path in sorted(FOLDER.glob(f"{name}.*"))])


def chats(name: ChatSet, encoder: PromptEncoder) -> list[Chat]:
    """Return the chats of one data set.

    Raises:
        ArtifactError: the model has no chat template.
    """
    if encoder.template is None:
        raise ArtifactError("this model has no chat template, and INT8 scales are calibrated on chats")
    end = encoder.tokenizer.eos_id
    found = []
    for line in (FOLDER / f"{name}.jsonl").read_bytes().splitlines():
        row = msgspec.json.decode(line, type=_Row)
        *turns, answer = row.messages
        prompt = encoder.encode(ChatPrompt(messages=tuple(turns)))
        reply = encoder.tokenizer.encode(answer.content)
        if row.complete and end is not None:
            reply.append(end)
        found.append(Chat(turns[-1].content, prompt, reply))
    return found


def bare(texts: Sequence[Sequence[int]], encoder: PromptEncoder, piece_tokens: int = 64) -> list[list[int]]:
    """Return every fourth of some chunks without the model's first token, cut into short pieces; [] if it has none."""
    if not encoder.prepend_bos:
        return []
    plain = [list(text[1:]) for text in texts[::4]]
    return [text[at : at + piece_tokens] for text in plain for at in range(0, len(text) - 1, piece_tokens)]


def chunks(name: TextSet, encoder: PromptEncoder, chunk_tokens: int = 512) -> list[list[int]]:
    """Return the text of one data set in chunks of `chunk_tokens`, the rest left out.

    Each chunk is preceded by the model's first token where it has one.
    """
    bos = encoder.tokenizer.bos_id
    begin = [bos] if encoder.prepend_bos and bos is not None else []
    ids = encoder.tokenizer.encode((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    step = chunk_tokens - len(begin)
    found = [begin + ids[at : at + step] for at in range(0, len(ids), step)]
    return [chunk for chunk in found if len(chunk) == chunk_tokens]
