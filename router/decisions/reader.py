"""Reads decision files, oldest first, also while they are written; what is no whole line is skipped and counted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from router.base.errors import ConfigError
from router.base.json_input import UNREADABLE
from router.decisions.line import Decision, decode
from router.decisions.pseudonyms import Pseudonyms, key_path
from router.decisions.rotation import rotated

_MAX_LINE_BYTES = 4 * 1024 * 1024


class DecisionReader:
    """The decisions of a log and its older files. Iterate as often as wanted.

    Attributes:
        read, skipped: decisions of the last iteration, and lines that were none, or damaged.

    Raises:
        ConfigError: there is no such log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = self.skipped = 0
        with self._files() as files:
            if not files:
                raise ConfigError(
                    f"there is no decision file {path}; `[decisions] path` of the tier's configuration turns it on"
                )

    def __iter__(self) -> Iterator[Decision]:
        self.read = self.skipped = 0
        with self._files() as files:
            for file in files:
                yield from self._lines(file)

    def find(self, request_id: str) -> Decision | None:
        """Return the last decision of a request id, as the caller knows it or as it stands in the file."""
        wanted = {request_id}
        if key_path(self.path).exists():
            with contextlib.suppress(
                ConfigError, OSError
            ):  # of another user: ids that were drawn at random are found without
                wanted.add(Pseudonyms.open(self.path).request_id(request_id))
        found = None
        for decision in self:
            if decision.request_id in wanted:
                found = decision
        return found

    @contextlib.contextmanager
    def _files(self) -> Iterator[list[BinaryIO]]:
        """Open all files, the oldest first.

        The newest is opened first: one that is renamed meanwhile is met again under its next name, and left out there.

        Raises:
            ConfigError: one cannot be read.
        """
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = []
            seen: set[tuple[int, int]] = set()
            number = 0
            while True:
                path = rotated(self.path, number)
                try:
                    file = stack.enter_context(path.open("rb"))
                except FileNotFoundError:
                    if number:
                        break
                except OSError as error:
                    raise ConfigError(f"cannot read {path}: {error.strerror}") from error
                else:
                    status = os.fstat(file.fileno())
                    if (status.st_dev, status.st_ino) not in seen:
                        seen.add((status.st_dev, status.st_ino))
                        files.append(file)
                number += 1
            yield files[::-1]

    def _lines(self, file: BinaryIO) -> Iterator[Decision]:
        while line := file.readline(_MAX_LINE_BYTES):
            if line.isspace():
                continue
            try:
                decision = decode(line)
            except UNREADABLE:
                self.skipped += 1
                continue
            self.read += 1
            yield decision
