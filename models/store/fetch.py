"""One file from one place to one path: over HTTP with resume, or by copying.

Every function here leaves a complete file at its target or raises; a partial download stays beside the target, as
`<name>.part`, and the next attempt goes on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from models.store import disk
from router.base.errors import ArtifactError

if TYPE_CHECKING:
    import httpx

_CHUNK_BYTES = 1 << 20
_IDLE_ATTEMPTS = 4  # consecutive attempts that bring no byte before a download is given up
_CONNECT_ATTEMPTS = 2
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class Progress(Protocol):
    """Watches one download after the other."""

    def begin(self, name: str, total_bytes: int | None) -> None:
        """A file starts; its size may be unknown."""
        ...

    def reach(self, done_bytes: int) -> None:
        """So much of the file has arrived."""
        ...

    def note(self, message: str) -> None:
        """Something worth a line happened: a retry, a wait, a fall-through to the next source."""
        ...


class Silence:
    """A `Progress` that shows nothing."""

    def begin(self, name: str, total_bytes: int | None) -> None: ...

    def reach(self, done_bytes: int) -> None: ...

    def note(self, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Download:
    """What an HTTP download brought.

    Attributes:
        commit: the repository commit a hub resolved the revision to, empty if the server names none.
        announced_sha256: the digest the hub announces for a large file, empty if it announces none.
    """

    commit: str = ""
    announced_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP download.

    Attributes:
        when_denied: what to do about HTTP 401 and 403.
        retry_wait_s: first wait between attempts; it doubles, up to 8 s.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    expected_bytes: int = 0
    when_denied: str = ""
    retry_wait_s: float = 0.5


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_text(text: str) -> str:
    """Return a text's SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def download(request: Request, target: Path, progress: Progress) -> Download:
    """Fetch a URL into `target`, resuming `<target>.part` if the server still has the same file.

    Raises:
        ArtifactError: the server refuses, keeps breaking off, sends another size, or the disk is full.
    """
    import httpx  # noqa: PLC0415 — a device with its model in place never needs it

    part = _Part(target)
    idle, wait_s = 0, request.retry_wait_s
    timeout = httpx.Timeout(30.0, connect=10.0)
    with httpx.Client(follow_redirects=True, timeout=timeout) as client:
        while True:
            before = part.size_bytes
            try:
                result = _attempt(client, request, part, progress)
            except (httpx.TransportError, _Interrupted) as error:
                idle = 0 if part.size_bytes > before else idle + 1
                unreachable = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                if idle >= (_CONNECT_ATTEMPTS if unreachable else _IDLE_ATTEMPTS):
                    raise ArtifactError(
                        f"{request.url}: {error or type(error).__name__}; tried {idle} times"
                    ) from error
                progress.note(f"{target.name}: {error or type(error).__name__}; going on at {part.size_bytes:,} bytes")
                time.sleep(wait_s)
                wait_s = request.retry_wait_s if idle == 0 else min(wait_s * 2, 8.0)
                continue
            except httpx.HTTPError as error:
                raise ArtifactError(f"{request.url}: {error}") from error
            part.complete()
            return result


class _Interrupted(Exception):
    """The server broke off or is not well; another attempt may help."""


class _Part:
    """A partial download and what is needed to go on with it: the server's validator and the whole size."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(target.name + ".part")
        self._memo = target.with_name(target.name + ".part.json")

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def validator(self) -> str:
        """The strong ETag, or the date, that the beginning was served under; empty if there is none to go on from."""
        try:
            return str(json.loads(self._memo.read_text(encoding="utf-8"))["validator"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def restart(self, validator: str) -> None:
        self.path.unlink(missing_ok=True)
        self._memo.write_text(json.dumps({"validator": validator}), encoding="utf-8")

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self._memo.unlink(missing_ok=True)

    def complete(self) -> None:
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self.path.replace(self.target)
        self._memo.unlink(missing_ok=True)


def _attempt(client: httpx.Client, request: Request, part: _Part, progress: Progress) -> Download:
    headers = {"accept-encoding": "identity", **request.headers}
    start = part.size_bytes if part.validator else 0
    if start:
        headers |= {"range": f"bytes={start}-", "if-range": part.validator}
    with client.stream("GET", request.url, headers=headers) as response:
        status = response.status_code
        if status == 416:  # the file changed, or nothing is missing: both are settled by a fresh start
            part.drop()
            raise _Interrupted("the partial download no longer fits")
        if status in (408, 429) or status >= 500:
            raise _Interrupted(f"HTTP {status}")
        if status not in (200, 206):
            remedy = f"; {request.when_denied}" if status in (401, 403) and request.when_denied else ""
            raise ArtifactError(f"{request.url}: HTTP {status} {response.reason_phrase}".rstrip() + remedy)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ArtifactError(f"{request.url}: the server compresses it, though asked not to; it cannot be resumed")
        total = _total_bytes(response, start, part)
        if request.expected_bytes and total not in (None, request.expected_bytes):
            part.drop()
            raise ArtifactError(f"{request.url}: {total} bytes, the catalogue says {request.expected_bytes}")
        done = part.size_bytes
        disk.need_space(part.target.parent, (total or 0) - done)
        progress.begin(part.target.name, total)
        with disk.disk_errors(part.path), part.path.open("ab") as file:
            for chunk in response.iter_raw():  # as they arrive: nothing is lost when the connection is
                file.write(chunk)
                done += len(chunk)
                progress.reach(done)
        if total is not None and done != total:
            if done > total:
                part.drop()
            raise _Interrupted(f"{done} of {total} bytes arrived")
        hops = (*response.history, response)
        return Download(
            commit=next((h.headers["x-repo-commit"] for h in hops if "x-repo-commit" in h.headers), ""),
            announced_sha256=next((d for d in map(_announced, hops) if d), ""),
        )


def _total_bytes(response: httpx.Response, start: int, part: _Part) -> int | None:
    """Return the whole file's size, None if unknown; makes `part` begin anew where the server does."""
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if response.status_code == 206 and found and int(found[1]) == start:
        return int(found[2])
    if response.status_code == 206:
        part.drop()
        raise _Interrupted("the server sent another range than asked for")
    etag = response.headers.get("etag", "")
    part.restart(response.headers.get("last-modified", "") if not etag or etag.startswith("W/") else etag)
    length = response.headers.get("content-length")
    return int(length) if length else None


def _announced(response: httpx.Response) -> str:
    """Return the SHA-256 that a Hugging Face hub gives large files as `x-linked-etag`, else nothing."""
    tag = response.headers.get("x-linked-etag", "").strip('"')
    return tag if re.fullmatch(r"[0-9a-f]{64}", tag) else ""


def copy(source: Path, target: Path, progress: Progress) -> None:
    """Copy a local file.

    Raises:
        ArtifactError: it cannot be read, or the disk is full.
    """
    if not source.is_file():
        raise ArtifactError(f"{source} does not exist or is no file")
    part = target.with_name(target.name + ".part")
    size_bytes = source.stat().st_size
    disk.need_space(target.parent, size_bytes)
    progress.begin(target.name, size_bytes)
    with disk.disk_errors(part), source.open("rb") as file:
        disk.write_through(file, part)
    progress.reach(size_bytes)
    part.replace(target)
