"""What models do besides generating text: calls whose answer is one value, computed in one go and kept by nobody.

To the router such a call is a prompt whose answer is a single token: what its inputs cost is the prefill, its first
token is its last one, and a replica that breaks is followed by another that begins anew.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from router.values.tensors import NamedTensor, Tensors


class Task(enum.Enum):
    """What is asked of a model; the value is its name in messages and in lists of models."""

    GENERATE = "generate"
    EMBED = "embed"
    RERANK = "rerank"
    SCORE = "score"
    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"
    SPEAK = "speak"
    INFER = "infer"
    TOKENIZE = "tokenize"
    """By whatever its model does: any server that offers it."""


GENERATES: frozenset[Task] = frozenset({Task.GENERATE})
"""What a replica does that says nothing else."""


MAX_INPUTS = 2048
"""Inputs of one call for vectors at most, as at OpenAI."""


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """Texts to be turned into vectors.

    Attributes:
        inputs: each a text, or token ids as the model's tokenizer writes them, its special tokens included.
        dimensions: length of the vectors, cut from the model's own and normalised again; None leaves them whole.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None

    @property
    def task(self) -> Task:
        return Task.EMBED


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector of unit length for each input, in order.

    Attributes:
        data: float32, little-endian, one vector after the other.
        dimensions: of each.
    """

    data: bytes
    dimensions: int

    def __len__(self) -> int:
        return len(self.data) // (4 * self.dimensions)

    def row(self, index: int) -> bytes:
        """Return one vector's bytes."""
        size = 4 * self.dimensions
        return self.data[index * size : (index + 1) * size]


@dataclass(frozen=True, slots=True)
class PassedCall:
    """A call for a server behind this tier, which takes it as its caller wrote it, but for the model's name.

    Attributes:
        task: what is asked of the model.
        path: where servers take it.
        media_type: of the body; of a form with its boundary.
        before, after: the body around the model's name.
        inputs: the text of each input, in bytes of UTF-8; empty where no input is text.
        streams: its reply goes on piece by piece, as it comes.
        links: what its server may fetch.
        method: of HTTP; one that is asked with GET has no body, and names its model in the query.
    """

    task: Task
    path: str
    media_type: str
    before: bytes
    after: bytes
    inputs: tuple[int, ...] = ()
    streams: bool = False
    links: tuple[str, ...] = ()
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class Passed:
    """A reply that is passed on, or a piece of it.

    Attributes:
        media_type: of the whole reply, as its server says.
    """

    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class TensorCall:
    """Inputs of a pipeline: tensors whose first dimension counts them, all of them alike in that."""

    tensors: tuple[NamedTensor, ...]

    @property
    def task(self) -> Task:
        return Task.INFER

    @property
    def rows(self) -> int:
        """How many inputs there are."""
        return self.tensors[0].shape[0]


Call = EmbedCall | PassedCall | TensorCall
Output = Embeddings | Passed | Tensors
