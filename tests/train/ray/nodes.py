"""A Ray cluster of several nodes on this machine, each a raylet of its own that can be killed with all it runs."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.conftest import BIN, ROOT, TRAINS, free_island, fresh_token, wait_for
from tests.processes import command, family

# Ports that the operating system picks: several raylets of one machine would pick the same.
PORTS = [f"--{name}-port=0" for name in ("min-worker", "max-worker", "dashboard-agent-listen")]
# One machine needs one monitor of logs, and nobody reads these.
SMALL = ["--object-store-memory=100000000", "--include-log-monitor=false"]
# Else a node waits a minute for a head that is gone.
RECONNECT_S = "10"


@dataclass
class Node:
    """One node of a resource: node.sh and what it started."""

    process: subprocess.Popen[bytes]
    resource: str = ""
    stays: bool = True

    @property
    def alive(self) -> bool:
        """Whether it is there and wasn't announced to be taken away."""
        return self.stays and self.process.poll() is None

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

    folder: Path
    port: int
    nodes: list[Node] = field(default_factory=list)
    token: dict[str, str] = field(default_factory=fresh_token)
    starts: int = 0

    @property
    def address(self) -> str:
        """What drivers connect to."""
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What drivers of this cluster are started with."""
        return {**os.environ, **self.token, "PATH": f"{BIN}:{os.environ['PATH']}"}

    def add(self, resource: str = "", amount: int = 0) -> Node:
        """Start a node with CPUs and a resource, as many of each, and wait until the head knows it.

        The first one is the head, without any. One after the other: of two at once on one machine, one gives up.
        """
        role = [self.address, resource, str(amount), "--num-cpus", str(amount)]
        if not self.nodes:
            role = ["head", "--port", str(self.port), "--ray-client-server-port", str(self.port + 1)]
            role += ["--temp-dir", f"{self.folder}/ray", "--include-dashboard=false"]
        self.starts += 1
        log = self.folder / f"node-{self.starts}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [
                    str(ROOT / "cluster_configs/slices/node.sh"),
                    *role,
                    "--node-ip-address=127.0.0.1",
                    *PORTS,
                    *SMALL,
                ],
                env={**self.environment, **TRAINS, "RAY_gcs_rpc_server_reconnect_timeout_s": RECONNECT_S},
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        node = Node(process, resource)
        ready = "Ray runtime started."
        try:
            wait_for(lambda: ready in log.read_text() or process.poll() is not None, 300, log.read_text)
            assert ready in log.read_text(), log.read_text()
        except AssertionError:
            node.kill()
            raise
        self.nodes.append(node)
        return node

    def slice(self, resource: str, count: int) -> list[Node]:
        """The living nodes of a resource, exactly so many: what is missing is added, what is too much killed."""
        nodes = [node for node in self.nodes if node.resource == resource and node.alive]
        for node in nodes[count:]:
            node.kill()
        return nodes[:count] + [self.add(resource, 1) for _ in range(count - len(nodes))]

    def drain(self, node: Node, seconds: int) -> None:
        """Announce that a node will be taken away, as a cloud does; returns once its raylet has agreed."""
        node.stays = False
        command = [str(BIN / "ray"), "drain-node", "--address", self.address, "--node-id", str(node.ray_id())]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
        command += ["--deadline-remaining-seconds", str(seconds)]
        subprocess.run(command, env=self.environment, capture_output=True, check=True, timeout=60)


@contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """A head without CPUs, which asks for a token of its own, and no nodes yet; in the end all are killed."""
    with TemporaryDirectory(prefix="ddm-nodes-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = Nodes(Path(folder), 20000 + 100 * free_island())
        try:
            nodes.add()
            yield nodes
        finally:
            for node in reversed(nodes.nodes):
                if node.process.poll() is None:
                    node.kill()
