"""Kills the process that started it once that gives no sign of life: `python liveness.py SECONDS`, signs to its input.

A process of its own, since one that is stopped, or whose threads wait for one that never returns, can't end itself. It
imports nothing of the package, so that it starts at once and costs 10 MB.
"""

import os
import select
import signal
import sys

TICK_SECONDS = 0.25


def main(seconds: float) -> None:
    """Ends when its input does. Time in which it couldn't run either, as on a machine that sleeps, isn't counted."""
    watched, silent = os.getppid(), 0.0
    while silent < seconds:
        ready, _, _ = select.select([sys.stdin], [], [], TICK_SECONDS)
        if ready and not os.read(0, 4096):
            return
        silent = 0.0 if ready else silent + TICK_SECONDS
    if os.getppid() == watched:
        os.kill(watched, signal.SIGKILL)
        print(f"process {watched} gave no sign of life for {seconds:g} s and was killed", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
