"""Liveness monitor: `python liveness.py SECONDS` kills its parent if that writes nothing to its input for so long.

It is a process of its own, since a process that is stopped, or in which no thread can run, can't end itself. It imports
nothing of the package, so that it starts at once and takes 10 MB.
"""

import os
import select
import signal
import sys

TICK_SECONDS = 0.25


def processor_share() -> float:
    """Share of a processor that a busy process gets now; 1 if the machine isn't crowded or its load is unknown."""
    try:
        with open("/proc/loadavg") as file:
            running = int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 1.0
    return min(1.0, (os.cpu_count() or 1) / max(1, running))


def watch_parent(seconds: float) -> None:
    """Watch until the input ends. Time in which this process couldn't run either, as in sleep, isn't counted."""
    watched, silent = os.getppid(), 0.0
    while silent < seconds:
        ready, _, _ = select.select([sys.stdin], [], [], TICK_SECONDS)
        if ready and not os.read(0, 4096):
            return
        silent = 0.0 if ready else silent + TICK_SECONDS * processor_share()
    if os.getppid() == watched:
        os.kill(watched, signal.SIGKILL)
        print(f"process {watched} gave no sign of life for {seconds:g} s and was killed", file=sys.stderr, flush=True)


if __name__ == "__main__":
    watch_parent(float(sys.argv[1]))
