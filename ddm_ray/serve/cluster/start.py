"""The start of a server as its command shows it: the step that is under way, and how many networks are ready."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddm_ray.data import OnProgress
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.engine.computing import Computing, num_calls
from ddm_ray.serve.engine.versions import Version

LOOK_SECONDS = 0.5
# Shares of the start: files are checked, then Ray starts, then Serve, then replicas with their networks.
CHECKED, RAY, SERVE, NETWORKS = 0.1, 0.2, 0.3, 0.95


@dataclass(frozen=True)
class ReadyCount:
    """Counts what replicas on this machine have ready, as empty files of a folder that lives as long as the start."""

    folder: str

    def __call__(self, name: str) -> None:
        """Count this once, in a replica. Never raises: the count is only shown."""
        with suppress(OSError):  # on another machine, and after the start, there is no such folder
            Path(self.folder, f"{os.getpid()} {name.replace('/', ' ')}").touch()

    def read(self) -> int:
        """The count; 0 if it can't be read."""
        with suppress(OSError):
            return len(os.listdir(self.folder))
        return 0


def expected(args: ServeArgs, version: Version) -> int:
    """The count at which all replicas are ready. With experts of their own each has the router, too."""
    router = int(version.router is not None)
    experts = sum(1 for _ in version) - router
    if args.placement == "per-expert":
        networks = experts + (len(version.experts) + args.replicas) * router
    else:
        networks = args.replicas * (experts + router)
    return num_calls(networks + (args.dense is not None), Computing(max_rows=args.max_rows, compile=args.compile))


@contextmanager
def shown(on_progress: OnProgress, ready: ReadyCount, total: int | None, compiles: bool) -> Iterator[None]:
    """Report, until the context ends, how much of `total` is ready; None: replicas on other machines aren't counted."""
    ended, words = threading.Event(), "compiling networks" if compiles else "loading networks"

    def look() -> None:
        done = min(total or 0, ready.read())
        count = "" if total is None else f": {done} of {total}"
        on_progress(SERVE + (NETWORKS - SERVE) * done / max(1, total or 0), words + count)

    def work() -> None:
        while not ended.wait(LOOK_SECONDS):
            look()

    look()
    thread = threading.Thread(target=work, name="start", daemon=True)
    thread.start()
    try:
        yield
        look()
    finally:
        ended.set()
        thread.join()
