"""Where a client runs: a virtual environment, a folder of npm, a program of this machine. Made once for its pins."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

INSTALL_LIMIT_S = 1200.0
CLIENTS = Path(__file__).resolve().parent / "clients"


class MissingError(Exception):
    """A client cannot run here; the message says why, and the table repeats it."""


@dataclass(frozen=True)
class Command:
    """How a script is started.

    Attributes:
        argv: the command line without the script's own arguments.
        env: over the environment of this process.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]


class Environment(Protocol):
    """Where the scripts of one or more clients run."""

    def prepare(self, root: Path, script: str) -> Command:
        """Make it under `root` if it is not there, and return how `script` is started.

        Raises:
            MissingError: it cannot be had here.
        """


@dataclass(frozen=True)
class Venv:
    """A virtual environment of its own.

    Attributes:
        name: of its folder.
        packages: pinned requirements of pip.
        programs: of this machine, which the script starts as well.
    """

    name: str
    packages: tuple[str, ...]
    programs: tuple[str, ...] = ()

    def prepare(self, root: Path, script: str) -> Command:
        _wanted(self.programs)
        home = root / self.name
        python = home / "bin" / "python"
        if not _stamped(home, self.packages):
            shutil.rmtree(home, ignore_errors=True)
            _install([sys.executable, "-m", "venv", str(home)], root)
            _install([str(python), "-m", "pip", "install", "--quiet", *self.packages], root)
            _stamp(home, self.packages)
        path = f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        # A client is to find what is installed for it, and nothing of this project.
        return Command(
            (str(python), str(CLIENTS / script)), {"PATH": path, "PYTHONPATH": "", "PYTHONWARNINGS": "ignore"}
        )


@dataclass(frozen=True)
class Npm:
    """Packages of npm in a folder of their own, for Node.js."""

    name: str
    packages: tuple[str, ...]

    def prepare(self, root: Path, script: str) -> Command:
        _wanted(("node", "npm"))
        home = root / self.name
        if not _stamped(home, self.packages):
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
            _install(["npm", "install", "--prefix", str(home), *quiet, *self.packages], root)
            _stamp(home, self.packages)
        return Command(("node", str(CLIENTS / script)), {"NODE_PATH": str(home / "node_modules")})


@dataclass(frozen=True)
class Programs:
    """Programs of this machine, the first of each group that is installed, driven by a script without packages.

    Attributes:
        runner: starts the script; empty: this interpreter.
    """

    groups: tuple[tuple[str, ...], ...]
    runner: tuple[str, ...] = ()

    def prepare(self, root: Path, script: str) -> Command:
        del root
        found = {group[0].upper().replace("-", "_"): _first(group) for group in self.groups}
        runner = self.runner or (sys.executable,)
        return Command((*runner, str(CLIENTS / script)), {**found, "PYTHONPATH": ""})


def _first(names: tuple[str, ...]) -> str:
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise MissingError(f"{' or '.join(names)} is not installed")


def _wanted(programs: tuple[str, ...]) -> None:
    for program in programs:
        _first((program,))


def _install(argv: list[str], root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise MissingError(f"{' '.join(argv[:5])} … took more than {INSTALL_LIMIT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no word of why"]
        raise MissingError(f"could not be installed: {last[0][:200]}")


def _digest(packages: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(packages).encode()).hexdigest()


def _stamped(home: Path, packages: tuple[str, ...]) -> bool:
    stamp = home / "pins.sha256"
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _digest(packages)


def _stamp(home: Path, packages: tuple[str, ...]) -> None:
    (home / "pins.sha256").write_text(_digest(packages), encoding="utf-8")
