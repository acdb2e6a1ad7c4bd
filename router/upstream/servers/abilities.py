"""What a server says of the abilities of its models: tasks by the paths that it has, and what chats may hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from router.values.feature import NOTHING, Feature
from router.values.task import GENERATES, Task

_PATHS: Mapping[Task, str] = {
    Task.GENERATE: "/v1/completions",
    Task.EMBED: "/v1/embeddings",
    Task.RERANK: "/v1/rerank",
    Task.SCORE: "/v1/score",
    Task.TRANSCRIBE: "/v1/audio/transcriptions",
    Task.TRANSLATE: "/v1/audio/translations",
    Task.SPEAK: "/v1/audio/speech",
}
_TEXT_ALONE = re.compile(
    r"not a multimodal|does not support (image|audio|vision|multi-?modal)|at most 0 (image|audio)"
    r"|(image|audio|vision) (input )?is not supported",
    re.IGNORECASE,
)


class _Description(msgspec.Struct):
    paths: dict[str, msgspec.Raw] = {}


def tasks_of(description: bytes) -> frozenset[Task]:
    """Return what the paths of an OpenAPI description say that a server's model does; it generates where none does.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is no such description.
    """
    paths = msgspec.json.decode(description, type=_Description).paths
    found = frozenset(task for task, path in _PATHS.items() if path in paths)
    return found if found and found != GENERATES else GENERATES


def media_told(vision: Any, audio: Any) -> frozenset[Feature]:
    """Return what a server says that chats with its model may hold; what is not true is nothing."""
    told = {Feature.IMAGES: vision, Feature.AUDIO: audio}
    return frozenset(feature for feature, able in told.items() if able is True) or NOTHING


def refuses_media(message: str) -> bool:
    """Whether a refusal says that the model takes text alone, and not that something is wrong with this request."""
    return _TEXT_ALONE.search(message) is not None
