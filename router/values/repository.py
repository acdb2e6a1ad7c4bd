"""The models that a tier can load and unload while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

State = Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a tier's repository.

    Attributes:
        name: a variant, or a family.
        state: in the words of KServe V2's repository extension.
        reason: why it is not ready.
        variants: who answers for a family; empty of a variant.
    """

    name: str
    state: State = "READY"
    reason: str = ""
    variants: tuple[str, ...] = ()


class Repository(Protocol):
    """What a tier lets its operator load and unload. A name is a variant's, or a family's for all its variants here."""

    def unloaded(self) -> Sequence[ModelState]:
        """Return what could be loaded and is not served now."""
        ...

    async def load(self, name: str) -> None:
        """Load a model, and serve it when it is ready; one that is served already stays as it is.

        Raises:
            ModelNotFound, InvalidRequest: there is no such model to load, or none that can be served here.
            Unavailable: it cannot be loaded; says why. Nothing has changed.
        """
        ...

    async def unload(self, name: str) -> None:
        """Take a model out of service, let its answers end, and free it.

        Raises:
            ModelNotFound: no such model is served.
            InvalidRequest: it is served elsewhere, behind this tier.
        """
        ...
