"""What the parent has sent to rank 0: taken between steps, and looked at within them."""

from __future__ import annotations

import os
import select
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from cloud_tier.engine.messages import Abort, Add, Channel, LimitLines, Quit

Message: TypeAlias = Add | Abort | LimitLines | Quit


class Inbox:
    """The messages of one channel, in their order; and a bell that ends a wait for them."""

    def __init__(self, parent: Channel) -> None:
        self._parent = parent
        self._bell, self._rope = os.pipe()
        self._poll = select.poll()
        for fd in (parent.socket.fileno(), self._bell):
            self._poll.register(fd, select.POLLIN)
        self._ahead: list[Message] = []
        self._aborted: set[int] = set()
        self._lines_wait = False

    def ring(self) -> None:
        """End a wait; from any thread."""
        os.write(self._rope, b".")

    def take(self, *, wait: bool) -> list[Message]:
        """Return all that has come; with `wait`, something has, or the bell rang.

        Raises:
            EOFError: the parent is gone.
        """
        found, self._ahead = self._ahead, []
        self._aborted.clear()
        self._lines_wait = False
        while ready := self._poll.poll(None if wait and not found else 0):
            if all(fd == self._bell for fd, _ in ready):
                os.read(self._bell, 4096)
                break
            found.append(self._parent.receive())
        return found

    def deserted(self, handles: Collection[int], yielding: AbstractSet[int] = frozenset()) -> bool:
        """Whether nobody waits for any of these requests any more. What else has come is kept for `take`.

        Args:
            yielding: those that need not be computed now if anybody else is.

        Raises:
            EOFError: the parent is gone.
        """
        while any(fd != self._bell for fd, _ in self._poll.poll(0)):
            message = self._parent.receive()
            self._ahead.append(message)
            if isinstance(message, Abort):
                self._aborted.add(message.handle)
            elif isinstance(message, LimitLines):
                self._lines_wait = message.lines == 0
            elif isinstance(message, Add) and not message.request.yields:
                self._lines_wait = True
        left = self._aborted | yielding if self._lines_wait else self._aborted
        return bool(left) and left.issuperset(handles)
