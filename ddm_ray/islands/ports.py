"""Blocks of ports on this machine, one an island: nobody else has any of a block's while an island starts in it."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ddm_ray.errors import RayAway

# Below those that Linux gives to outgoing connections, beside those of island.sh: 20000 and up.
BLOCKS = (*range(12000, 20000, 100), *range(30000, 32700, 100))
SIZE = 100
FIXED = (
    "port",
    "dashboard-port",
    "ray-client-server-port",
    "node-manager-port",
    "object-manager-port",
    "metrics-export-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
)
"""Options of `ray start` that take a port, in the order of a block: Ray's address is the first, the Jobs API next."""
HELD = len(FIXED)
FIRST_WORKER = HELD + 1


def options(base: int) -> dict[str, int]:
    """Options of `ray start` by which all that a cluster of one node listens to lies in the block at `base`."""
    fixed = {name: base + place for place, name in enumerate(FIXED)}
    return fixed | {"min-worker-port": base + FIRST_WORKER, "max-worker-port": base + SIZE - 1}


def in_use(base: int) -> list[int]:
    """Ports of a block that somebody listens to, the held one aside."""
    return [port for port in range(base, base + SIZE) if port != base + HELD and not _free(port)]


@contextmanager
def free_block(blocks: Sequence[int] = BLOCKS) -> Iterator[int]:
    """Hold the first block that nobody uses or holds, against whoever asks by this function, while the context lasts.

    Yields its first port. Raises RayAway if none is free.
    """
    for base in blocks:
        with socket.socket() as held:
            try:
                # Bound, never listened to: nobody can connect, and nobody else can bind it.
                held.bind(("127.0.0.1", base + HELD))
            except OSError:
                continue
            if not in_use(base):
                yield base
                return
    raise RayAway(f"no {SIZE} ports in a row are free between {blocks[0]} and {blocks[-1] + SIZE - 1}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: what waits for the last packets of an ended connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
