"""Becomes a command that is told to stop when the process that started it is gone.

Usage: `python leash.py PARENT_PID COMMAND ...`. The kernel's parent-death signal survives `exec`,
so it is set here, in the child's own single-threaded process, and not in a `preexec_fn` between
fork and exec of a process that may have threads. The file imports nothing of ours: it is run by
path, isolated, and costs one bare interpreter start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Set the death signal, make sure the parent still lives, and become the command."""
    parent_pid, command = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the signal was armed
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 (no shell is wanted)


if __name__ == "__main__":
    main(sys.argv[1:])
