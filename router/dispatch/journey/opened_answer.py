"""An answer whose first chunk is there already."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from router.values.answer import Tap
from router.values.chunk import TokenChunk


class OpenedAnswer(AsyncGenerator[TokenChunk, None]):
    """An answer whose first chunk is there. Closing it ends the work, also when nobody ever read from it.

    Args:
        tap: called with whom the text goes to; see `router.values.answer.Tapped`.
    """

    def __init__(self, first: TokenChunk, rest: AsyncGenerator[TokenChunk, None], tap: Callable[[Tap], None]) -> None:
        self._first: TokenChunk | None = first
        self._rest = rest
        self.tap = tap

    def __anext__(self) -> Coroutine[Any, Any, TokenChunk]:
        return self._rest.asend(None) if self._first is None else self._begin()

    def asend(self, value: None) -> Coroutine[Any, Any, TokenChunk]:
        return self._rest.asend(value) if self._first is None else self._begin()

    async def _begin(self) -> TokenChunk:
        first, self._first = self._first, None
        return await self._rest.asend(None) if first is None else first

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None) -> TokenChunk:  # noqa: ARG002 - the ABC's own
        self._first = None
        return await self._rest.athrow(typ if val is None else val)

    async def aclose(self) -> None:
        self._first = None
        await self._rest.aclose()
