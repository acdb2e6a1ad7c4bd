"""An answer whose first chunk is there already."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from router.values.chunk import TokenChunk


class OpenedAnswer(AsyncGenerator[TokenChunk, None]):
    """An answer whose first chunk is there. Closing it ends the work, also when nobody ever read from it."""

    def __init__(self, first: TokenChunk, rest: AsyncGenerator[TokenChunk, None]) -> None:
        self._first: TokenChunk | None = first
        self._rest = rest

    async def asend(self, value: None) -> TokenChunk:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await self._rest.asend(value)

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None) -> TokenChunk:  # noqa: ARG002 - the ABC's own
        self._first = None
        return await self._rest.athrow(typ if val is None else val)

    async def aclose(self) -> None:
        self._first = None
        await self._rest.aclose()
