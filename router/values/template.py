"""What makes text of a conversation for servers that take text alone."""

from __future__ import annotations

from collections.abc import Callable

from router.values.prompt import ChatPrompt

Render = Callable[[ChatPrompt, str], str]
"""From a conversation, and what was emitted of the answer already, to the text to go on with."""

Renderers = Callable[[str, str], Render | None]
"""From a model's name, and a path that may hold its template (or is empty), to what renders for it; None: unknown."""


def no_renderers(model: str, path: str) -> None:
    """Know no template."""
