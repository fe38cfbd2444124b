"""Kills the process that started it once that gives no sign of life: `python liveness.py SECONDS`, signs to its input.

A process of its own, since one that is stopped, or whose threads wait for one that never returns, can't end itself. It
imports nothing of the package, so that it starts at once and costs 10 MB.
"""

import os
import select
import signal
import sys

TICK_SECONDS = 0.25
STARVED = 0.1
"""Share of the time that counts in which the process wants a processor: on a crowded machine it may get none."""


def wants_a_processor(pid: int) -> bool:
    """True if a thread of the process runs, or waits for its turn to; False for one that is stopped or blocked."""
    tasks = f"/proc/{pid}/task"
    try:
        for task in os.listdir(tasks):
            with open(f"{tasks}/{task}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "R":
                    return True
    except OSError:
        pass  # one that has just ended
    return False


def processor_share() -> float:
    """Share of a processor that who wants one gets now: 1 on a machine that isn't crowded, or can't be asked."""
    try:
        with open("/proc/loadavg") as file:
            running = int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 1.0
    return min(1.0, (os.cpu_count() or 1) / max(1, running))


def main(seconds: float) -> None:
    """Ends when its input does. Time in which it couldn't run either, as on a machine that sleeps, isn't counted."""
    watched, silent = os.getppid(), 0.0
    while silent < seconds:
        ready, _, _ = select.select([sys.stdin], [], [], TICK_SECONDS)
        if ready and not os.read(0, 4096):
            return
        # One that waits for another process, as ranks do for each other, is as slow as that one.
        share = min(STARVED, processor_share()) if wants_a_processor(watched) else processor_share()
        silent = 0.0 if ready else silent + TICK_SECONDS * share
    if os.getppid() == watched:
        os.kill(watched, signal.SIGKILL)
        print(f"process {watched} gave no sign of life for {seconds:g} s and was killed", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
