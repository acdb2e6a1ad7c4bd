"""Every message between the processes of one engine, and the frames they travel in.

Parent and rank 0 talk over one socket, rank 0 and each other rank over another: a length (4 bytes, little-endian), then
MessagePack. The end of a stream means that the other process is gone.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from cloud_tier.engine.protocol import EngineConfig, EngineInfo, EngineLoad, EngineRequest
from router.values.chunk import FinishReason
from router.values.logprobs import DrawnToken

LENGTH = struct.Struct("<I")
MESH_LIMIT_BYTES = 64 * 1024
"""The largest tensor that CPU ranks hand each other directly (see `mesh`)."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Parent → every rank, first: what to run.

    Attributes:
        rendezvous: a file the ranks find each other by; it does not exist yet.
    """

    config: EngineConfig
    rank: int
    rendezvous: str


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Parent → rank 0: a new request, under a number that grows with every one."""

    handle: int
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Parent → rank 0: nobody waits for this one any more."""

    handle: int


class LimitLines(msgspec.Struct, frozen=True, tag="limit_lines"):
    """Parent → rank 0: see `Engine.limit_lines`."""

    lines: int | None


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    """Parent → rank 0 → other ranks: leave the process group and exit."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Every rank → parent: it has its weights, on this device (`cpu`, or `cuda` and the GPU's name)."""

    device: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Rank 0 → parent: every rank has its weights and has run a step."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A rank → parent: it cannot run, and why. `kind` is the class of the error, of `router.base.errors` or another."""

    kind: str
    message: str


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """What one step brought one request.

    Attributes:
        failure: why this request ended without an answer, while the engine goes on.
        invalid: the field of the request that is to blame for that, as far as one is.
        closed: a token that is no part of the answer ended it.
        cached_tokens: with its first token: tokens of the prompt that were found in the prefix cache.
        logprobs: of `token_ids`, where they were asked for.
        prompt_logprobs: of the prompt, with its first token, where they were asked for.
    """

    handle: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    failure: str | None = None
    cached_tokens: int | None = None
    logprobs: tuple[DrawnToken, ...] = ()
    prompt_logprobs: tuple[DrawnToken, ...] = ()
    invalid: str | None = None
    closed: bool = False


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Rank 0 → parent after every step, and when the last work was aborted.

    Attributes:
        last_handle: the newest request that `load` knows of.
    """

    tokens: list[Tokens]
    load: EngineLoad
    last_handle: int


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one sequence in a step.

    Attributes:
        start: position of the first.
        tokens: their ids.
        runs: all blocks of the sequence up to the last position, as (first block, number of blocks).
        draws: whether the logits after the last token are needed.
        handle: of the sequence, by which a CPU remembers where its keys lie side by side.
        earlier: how many tokens before the last have their logits needed too: where the last are drafts, or the
            prompt is scored.
    """

    start: int
    tokens: list[int]
    runs: list[tuple[int, int]]
    draws: bool
    handle: int = -1
    earlier: int = 0


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Rank 0 → other ranks: run this step. Every rank runs the same one on its own share of the weights.

    Attributes:
        zero_blocks: blocks to overwrite with zeros before anything is written.
        released: handles of sequences that lost their blocks since the last step: ended, aborted or preempted.
    """

    segments: list[Segment]
    zero_blocks: list[int] = []
    released: list[int] = []


ToRank0: TypeAlias = Setup | Add | Abort | LimitLines | Quit
ToParent: TypeAlias = Loaded | Ready | Failed | Step
ToPeer: TypeAlias = Compute | Quit

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Return the message with its length before it."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


@dataclass(slots=True)
class Channel:
    """A blocking end of a socket inside an engine process.

    Attributes:
        decoder: of the messages that arrive here.
    """

    socket: socket.socket
    decoder: msgspec.msgpack.Decoder[Any]

    def send(self, message: msgspec.Struct) -> None:
        """Write one message.

        Raises:
            OSError: the other process is gone.
        """
        self.socket.sendall(frame(message))

    def receive(self) -> Any:
        """Wait for one message.

        Raises:
            EOFError: the other process is gone.
        """
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return self.decoder.decode(self._exactly(length))

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.socket.recv(size - len(parts))
            if not part:
                raise EOFError("the other end of the engine's channel is closed")
            parts += part
        return bytes(parts)
