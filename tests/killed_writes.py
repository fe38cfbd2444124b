"""Processes that are killed by SIGKILL at one of their writes into a store.

`python -m tests.killed_writes MODULE:FUNCTION URL EVERY` calls the function with URL-quiet to its end, and prints how
often that wrote. Then it calls it with URL-0, URL-EVERY, ... in processes that die at that write.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ddm_ray.store.store import Store
from tests.conftest import ROOT


def kill_at_writes(make: str, url: str, every: int) -> range:
    """Run the above in a process of its own; returns the writes at which calls were killed."""
    command = [sys.executable, "-m", "tests.killed_writes", make, url, str(every)]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    writes = int(done.stdout)
    assert writes > 20
    return range(0, writes, every)


class Dying:
    """`Store._put`, with SIGKILL at the write of number `last`; None: at none."""

    def __init__(self) -> None:
        self.put, self.writes, self.last = Store._put, 0, None

    def __call__(self, store: Store, *arguments: Any, **options: Any) -> Any:
        if self.writes == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.writes += 1
        return self.put(store, *arguments, **options)


def main(make: Callable[[str], object], url: str, every: int) -> None:
    dying = Dying()
    Store._put = lambda *arguments, **options: dying(*arguments, **options)  # type: ignore[method-assign]
    make(f"{url}-quiet")
    print(dying.writes, flush=True)
    for last in range(0, dying.writes, every):
        child = os.fork()
        if not child:
            dying.writes, dying.last = 0, last
            make(f"{url}-{last}")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, last


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    main(getattr(import_module(module), function), sys.argv[2], int(sys.argv[3]))
