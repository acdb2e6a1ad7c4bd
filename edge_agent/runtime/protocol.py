"""What the generation loop asks of anything that can compute logits on this device.

A runtime owns the weights and the KV cache. The loop opens a sequence, feeds it token ids in steps, and closes it;
it never sees a key or a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edge_agent.runtime.manifest import Manifest
from edge_agent.runtime.private_copy import PrivateCopies
from hardware_profiles.loader import RuntimeOptions

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RuntimeRequest:
    """What to load and within which bounds.

    Attributes:
        artifact_dir: a directory with a manifest.json, as the model store places it.
        slots: sequences that may be open at once.
        context_tokens: longest sequence; the KV cache never outgrows slots · context_tokens.
        chunk_tokens: most prompt tokens in one step.
        missed: one line for each way to run that was tried before this one and is not there.
        notes: what else to say of the runtime in its facts.
        manifest: of the artifact, where it was read before; None reads it from `artifact_dir`.
        copies: keeps private copies of what is mapped into memory; None maps the files of `artifact_dir`.
    """

    artifact_dir: Path
    options: RuntimeOptions
    slots: int
    context_tokens: int
    chunk_tokens: int
    missed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    manifest: Manifest | None = None
    copies: PrivateCopies | None = None


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """What a loaded runtime is.

    Attributes:
        providers: what really executes, best first.
        fallbacks: one line for each thing asked for and not had, empty when all is as the profile says.
        kv_bytes_per_token: KV cache bytes of one position of one sequence.
        scored_tokens: most ids of one step behind each of which it tells the logits.
        notes: what else an operator should know, one line each.
    """

    name: str
    variant: str
    vocab_size: int
    context_tokens: int
    slots: int
    kv_bytes_per_token: int
    providers: tuple[str, ...]
    fallbacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    scored_tokens: int = 1


@dataclass(frozen=True, slots=True)
class StepInput:
    """The next tokens of one open sequence, placed after everything fed before.

    Attributes:
        sequence: what `open` returned.
        token_ids: at least one id.
        want_logits: False for all but the last chunk of a prompt.
        every: the logits behind each of them are wanted; at most `RuntimeFacts.scored_tokens`, in a batch of its own.
    """

    sequence: int
    token_ids: Sequence[int]
    want_logits: bool = True
    every: bool = False


class Runtime(Protocol):
    """Executes one model variant. Not thread-safe: one thread opens, feeds and closes."""

    @property
    def facts(self) -> RuntimeFacts:
        """What is loaded."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache that is in use now, what is kept included; read from any thread."""
        ...

    def open(
        self, token_ids: Sequence[int], caller: str = "", *, exact: bool = False, from_scratch: bool = False
    ) -> tuple[int, int]:
        """Start a sequence that will be fed `token_ids`. What is kept of others gives way where it has to.

        Args:
            caller: who asks; what was kept of somebody else is not used.
            exact: use only what a run that reuses nothing would compute to the same bits.
            from_scratch: use nothing: every id will be fed, the first one alone.

        Returns:
            The sequence's handle, and how many leading ids are in the cache already (fewer than len(token_ids)).

        Raises:
            RuntimeError: every slot is taken by an open sequence.
        """
        ...

    def forward(self, batch: Sequence[StepInput]) -> Logits:
        """Compute one step; every input of a batch feeds the same number of ids.

        Returns:
            float32 (n, vocab): the logits after the last id of each of the n inputs that want them, in their order; of
            a step with `every`, those after each of its n ids.
            Valid until the next call. Those of a sequence that went wrong are not finite; it is then of no more use.

        Raises:
            Exception: nothing was computed for any input, and the same inputs may be fed again, together or alone.
        """
        ...

    def close_sequence(self, sequence: int, *, keep: bool = False) -> None:
        """Forget a sequence; its slot is free.

        Args:
            keep: its cache may serve later sequences of its caller, within the memory of free slots. A runtime that
                cannot keep any, or finds the sequence unsound, keeps nothing.
        """
        ...

    def trim_kept(self, most: int) -> None:
        """Drop caches that are kept of closed sequences, least recently used first, until at most so many are left."""
        ...

    def release_memory(self) -> None:
        """Give back what an idle runtime does not need."""
        ...

    def close(self) -> None:
        """Free the weights and the cache; the runtime is not used afterwards."""
        ...


class RuntimeFactory(Protocol):
    """Loads a runtime.

    Raises:
        ArtifactError: a file is missing, damaged or of the wrong kind.
        ConfigError: the runtime cannot run on this machine as asked.
    """

    def __call__(self, request: RuntimeRequest) -> Any: ...
