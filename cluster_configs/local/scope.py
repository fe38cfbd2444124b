"""Runs a command, and ends with it all that it has started: `scope.py COMMAND...`; exits as the command does.

Jobs of a Ray are in sessions of their own, and when its head is lost Ray ends the shells of jobs, not what these have
started. Here orphans become children of this process, so that it knows them.
"""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SET_CHILD_SUBREAPER = 36  # of Linux's prctl
END_SECONDS = 10  # which the command has to end by itself; Ray would wait longer for its jobs


def own_children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def main() -> int:
    ctypes.CDLL(None, use_errno=True).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Descriptors stay open below: a lock that the caller holds by one lasts until all is ended.
    command = subprocess.Popen(sys.argv[1:], close_fds=False)
    # The command gets these, too, as one of this process group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: signal.alarm(END_SECONDS))
    signal.signal(signal.SIGALRM, lambda *_: command.kill())
    status = None
    while status is None:
        pid, ended = os.wait()
        status = ended if pid == command.pid else None
    command.returncode = os.waitstatus_to_exitcode(status)
    # Linux lists children without those that it passes over while others end: only `wait` tells that none is left.
    with suppress(ChildProcessError):
        while True:
            for pid in own_children():
                os.kill(pid, signal.SIGKILL)
            os.wait()
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


if __name__ == "__main__":
    sys.exit(main())
