"""Become another program, which is asked to end when the parent of this one does, whatever that dies of.

Run by its path, with the parent's process id and the command; imports nothing of this project, so that it takes a
moment only and no environment but the command's own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; stands through execve


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(parent_pid):  # it died before that could be heard of
        sys.exit("the parent is gone")
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
