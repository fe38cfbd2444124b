#!/usr/bin/env python3
"""Runs `ray start --block` with these options, up to three times, until its node lives: `start_ray.py OPTIONS...`.

Ray gives up if its node isn't registered within 30 s, and a busy machine may need longer. Once the node has lived,
nothing is tried again. SIGTERM and Ctrl-C reach Ray as SIGTERM. It exits as Ray does.
"""

import signal
import subprocess
import sys
import threading

LIVES = "Ray runtime started."
PAUSES = (1.0, 3.0)
USAGE, NOT_FOUND = 2, 127


def main() -> int:
    leaving = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: leaving.set())
    for pause in (*PAUSES, None):
        try:
            ray = subprocess.Popen(["ray", "start", "--block", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            print("start_ray.py: no `ray` on PATH; activate the environment that has it", file=sys.stderr)
            return NOT_FOUND
        lived = False
        # From now on a signal ends Ray, and with it the loop over its lines.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_, ray=ray: (leaving.set(), ray.terminate()))
        if leaving.is_set():
            ray.terminate()
        for line in ray.stdout or ():
            lived |= LIVES in line
            print(line, end="", flush=True)
        status = ray.wait()
        if lived or pause is None or status in (0, USAGE) or leaving.is_set():
            break
        print(f"start_ray.py: Ray's node didn't start; again in {pause:.0f} s", file=sys.stderr)
        if leaving.wait(pause):
            break
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
