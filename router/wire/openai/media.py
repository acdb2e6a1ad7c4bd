"""Images and sounds in the messages of a chat: checked, never fetched and never unpacked, and written as they came."""

from __future__ import annotations

import io
import re
import wave
from collections.abc import Sequence

import msgspec
import orjson

from router.base.errors import InvalidRequest
from router.values.feature import Feature
from router.values.prompt import MediaPart, Message

MEDIA_TYPES = frozenset({"image_url", "input_audio"})
MAX_MEDIA = 64
"""Of one chat."""

_MAX_URL_CHARS = 8192
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
_LINK = re.compile(r"https?://[!-~]+", re.IGNORECASE | re.ASCII)
_FORMAT = re.compile(r"[a-z0-9]{1,16}")


class RawImage(msgspec.Struct, frozen=True):
    """What is shown."""

    url: str
    detail: str | None = None


class RawSound(msgspec.Struct, frozen=True):
    """What is heard, in base64."""

    data: str
    format: str


def image_of(raw: RawImage | str | None, at: str) -> MediaPart:
    """Check an image.

    Raises:
        InvalidRequest: naming what is wrong with it.
    """
    image = RawImage(raw) if isinstance(raw, str) else raw
    if image is None:
        raise InvalidRequest(f'`{at}` is required: {{"url": …}}', param=at)
    linked = len(image.url) <= _MAX_URL_CHARS and _LINK.fullmatch(image.url)
    if not linked and not _DATA_URL.match(image.url):
        raise InvalidRequest(
            f"`{at}.url` begins with `{image.url[:32]}`: send the image as `data:image/…;base64,…`, or an http or "
            f"https URL of at most {_MAX_URL_CHARS} characters, which the server that runs the model fetches",
            param=f"{at}.url",
        )
    told = {"url": image.url} if image.detail is None else {"url": image.url, "detail": image.detail}
    return MediaPart(Feature.IMAGES, _written("image_url", told, at), image.url if linked else "")


def sound_of(raw: RawSound | None, at: str) -> MediaPart:
    """Check a sound.

    Raises:
        InvalidRequest: naming what is wrong with it.
    """
    if raw is None or not raw.data:
        raise InvalidRequest(f'`{at}` is required: {{"data": base64, "format": "wav"}}', param=at)
    if not _FORMAT.fullmatch(raw.format):
        raise InvalidRequest(f"`{at}.format`: got `{raw.format[:32]}`, expected `wav` or `mp3`", param=f"{at}.format")
    return MediaPart(Feature.AUDIO, _written("input_audio", {"data": raw.data, "format": raw.format}, at))


def _written(kind: str, told: dict[str, str], at: str) -> bytes:
    try:
        return orjson.dumps({"type": kind, kind: told})
    except TypeError:  # half a surrogate pair
        raise InvalidRequest(f"`{at}` holds what is no text", param=at) from None


def media_in(messages: Sequence[Message]) -> frozenset[Feature]:
    """Return what of the turns is no text.

    Raises:
        InvalidRequest: there is too much of it.
    """
    found = [part.kind for message in messages for part in message.parts if isinstance(part, MediaPart)]
    if len(found) > MAX_MEDIA:
        raise InvalidRequest(
            f"`messages`: {len(found)} images and sounds, at most {MAX_MEDIA} are taken at once", param="messages"
        )
    return frozenset(found)


def silent_wav(samples: int) -> bytes:
    """Return a WAV file without a sound: one channel of 16 bits, 16,000 samples a second."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(bytes(2 * samples))
    return file.getvalue()
