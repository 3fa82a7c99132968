"""Ends the process groups of a supervisor that was killed, also those that ignore SIGTERM.

Usage: `python guardian.py GRACE_S` with a pipe as standard input. The supervisor writes `+PGID` when
it starts a child and `-PGID` when that child is gone. End of file while groups are left means that
the supervisor died without cleaning up: they get SIGTERM, then SIGKILL after `GRACE_S` seconds.
Like the leash, it is run by path and imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

CHECK_S = 0.05


def send(group: int, number: int) -> bool:
    """Signal a process group (0 only asks); False when nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return number == 0
    return True


def end_groups(groups: set[int], grace_s: float) -> None:
    """SIGTERM all groups, SIGKILL what is left after `grace_s`."""
    for group in groups:
        send(group, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while time.monotonic() < deadline_s:
        if not any(send(group, 0) for group in groups):
            return
        time.sleep(CHECK_S)
    for group in groups:
        send(group, signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Keep the list until the pipe closes, then end what is on it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        with contextlib.suppress(ValueError):
            group = int(line)
            groups.add(group) if group > 0 else groups.discard(-group)
    end_groups(groups, float(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
