"""A Ray cluster of several nodes on this machine, each a raylet of its own that can be killed with all it runs."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.conftest import BIN, wait_for
from tests.processes import command, family

# Ports that the operating system picks: several raylets of one machine would pick the same.
PORTS = [f"--{name}-port=0" for name in ("min-worker", "max-worker", "dashboard-agent-listen")]
MEMORY = "--object-store-memory=100000000"
HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
# Else a node waits a minute for a head that is gone.
HEALTH["RAY_gcs_rpc_server_reconnect_timeout_s"] = "10"


@dataclass(frozen=True)
class Node:
    """One node: `ray start --block` and what it started."""

    process: subprocess.Popen[bytes]

    def pids(self) -> list[int]:
        """The node's processes."""
        return family(self.process.pid)

    def trainers(self) -> list[int]:
        """Processes that train."""
        return [pid for pid in self.pids() if command(pid).startswith("ray::RayTrainWorker")]

    def ray_id(self) -> str | None:
        """Ray's name of it, once its raylet runs."""
        words = [word for pid in self.pids() if "raylet/raylet " in (line := command(pid)) for word in line.split()]
        return next((word.partition("=")[2] for word in words if word.startswith("--node_id=")), None)

    def kill(self) -> None:
        """The machine is gone: SIGKILL to all of it, stopped first so that nothing is started meanwhile."""
        for one in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, one)
        self.process.wait()


@dataclass
class Nodes:
    """The head, which runs no training, and the nodes that were added."""

    folder: str
    log: Path
    port: int
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        """What drivers connect to."""
        return f"127.0.0.1:{self.port}"

    def add(self, resources: dict[str, int]) -> Node:
        """Start a node with these resources, the first one the head, and wait until the head knows it.

        One after the other: of two at once on one machine, one gives up.
        """
        node = self._start(resources)
        self.nodes.append(node)
        wait_for(lambda: node.ray_id() in self._alive(), 60, lambda: self.log.read_text()[-3000:], every=0.2)
        return node

    def _start(self, resources: dict[str, int]) -> Node:
        custom = {name: amount for name, amount in resources.items() if name != "CPU"}
        role = ["--address", self.address]
        if not self.nodes:
            role = ["--head", "--port", str(self.port), "--ray-client-server-port", str(self.port + 1)]
            role += ["--temp-dir", self.folder, "--include-dashboard=false"]
        role += ["--num-cpus", str(resources["CPU"]), "--resources", json.dumps(custom)]
        with self.log.open("ab") as sink:
            process = subprocess.Popen(
                [str(BIN / "ray"), "start", "--block", "--node-ip-address=127.0.0.1", *role, *PORTS, MEMORY],
                env={**os.environ, **HEALTH, "PATH": f"{BIN}:{os.environ['PATH']}"},
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        return Node(process)

    def drain(self, node: Node, seconds: int) -> None:
        """Announce that a node will be taken away, as a cloud does; returns once its raylet has agreed."""
        told = [
            str(BIN / "ray"),
            "drain-node",
            "--address",
            self.address,
            "--node-id",
            str(node.ray_id()),
            "--reason-message=spot",
        ]
        told += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", str(seconds)]
        subprocess.run(told, capture_output=True, check=True, timeout=60)

    def _alive(self) -> set[str]:
        """Ray's names of the nodes that the head believes to be there."""
        from ray._raylet import GcsClient

        with suppress(Exception), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            known = GcsClient(address=self.address).get_all_node_info()
            return {name.hex() for name, node in known.items() if node.state == 0}
        return set()


@contextmanager
def ray_nodes(port: int, log: Path) -> Iterator[Nodes]:
    """A head without CPUs at this port, and no nodes yet; in the end all are killed."""
    with TemporaryDirectory(prefix="ddm-nodes-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = Nodes(folder, log, port)
        try:
            nodes.add({"CPU": 0})
            yield nodes
        finally:
            for node in reversed(nodes.nodes):
                if node.process.poll() is None:
                    node.kill()
