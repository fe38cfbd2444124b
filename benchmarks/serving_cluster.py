"""A Ray cluster of several nodes on this machine, and a run that `serve run` serves there by a configuration."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from serving_load import START_S, Client

# Before Ray is imported: every process of the cluster has to have them.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16), RAY_USAGE_STATS_ENABLED="0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as mixture.yaml advises
import ray
from ray import serve
from ray.cluster_utils import Cluster

from ddm_ray.serve.gateway import Gateway, find_haproxy
from tests.processes import command, family

ROOT = Path(__file__).parents[1]


class ServedCluster:
    """Nodes below this process, and what Serve runs on them. The head has the proxy alone."""

    def __init__(self, folder: Path, num_nodes: int):
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": f"{folder}/ray"}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add_node() for _ in range(num_nodes)]
        ray.init(self.cluster.address, log_to_driver=False, logging_level="ERROR")
        self.port = 0

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=8)

    def kill_node(self) -> None:
        """SIGKILL a node's raylet, whose processes then end; another node takes its place."""
        node = self.nodes.pop(0)
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes.append(self.add_node())

    def pids(self, title: str) -> list[int]:
        """Processes whose title has these words: `ServeReplica:ddm:expert-000`, `ServeController`, `ProxyActor`."""
        return [pid for pid in family(os.getpid()) if title in command(pid)]

    def running(self, deployment: str) -> int:
        """Replicas of a deployment that run."""
        deployments = serve.status().applications["ddm"].deployments
        return int(deployments[deployment].replica_states.get("RUNNING", 0))

    def until_whole(self, num_replicas: int, seconds: float = 300.0) -> float:
        """Seconds until every deployment has so many replicas that run."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            try:
                deployments = serve.status().applications["ddm"].deployments
            except Exception:  # the controller may have been killed
                deployments = {}
            counts = [each.replica_states.get("RUNNING", 0) for each in deployments.values()]
            if counts and min(counts) >= num_replicas:
                return time.monotonic() - began
            time.sleep(0.2)
        sys.exit("replicas don't come back")


def configuration(run: str, port: int, options: Callable[[str], dict[str, Any]], **args: Any) -> dict[str, Any]:
    """A configuration of Serve for a run of any number of experts; `options` of each deployment by its name."""
    from ddm_ray.run.run import Run

    names = [f"expert-{k:03d}" for k in range(Run.open(run).config.partition.num_clusters)]
    shared = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 1000}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": port, "request_timeout_s": 330},
        "logging_config": {"log_level": "ERROR", "enable_access_log": False},
        "applications": [
            {
                "name": "ddm",
                "route_prefix": "/",
                "import_path": "ddm_ray.serve.app:build_app",
                "args": {"run": os.path.abspath(run), "placement": "per-expert", **args},
                "deployments": [{"name": name, **shared, **options(name)} for name in (*names, "api")],
            }
        ],
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def cluster_serving(run: str, options: Callable[[str], dict[str, Any]], num_nodes: int = 2) -> Iterator[ServedCluster]:
    """`serve run` of a configuration on a cluster of its own, behind a gateway, once all is there."""
    port, proxy_port = _free_port(), _free_port()
    with tempfile.TemporaryDirectory(prefix="ddm", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["PYTHONPATH"] = str(ROOT)
        served = ServedCluster(Path(folder), num_nodes)
        served.port = port
        config = Path(folder) / "config.yaml"
        # On one machine the nodes' proxies share a port, and the kernel parts connections among them.
        config.write_text(yaml.safe_dump(configuration(run, proxy_port, options)))
        env = {**os.environ, "RAY_ADDRESS": served.cluster.address, "OMP_NUM_THREADS": "1"}
        log = (Path(folder) / "log").open("wb")
        serve_run = [str(Path(sys.executable).parent / "serve"), "run", str(config)]
        process = subprocess.Popen(serve_run, env=env, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        gateway = Gateway("127.0.0.1", port, [("127.0.0.1", proxy_port)], find_haproxy() or sys.exit("no HAProxy"))
        gateway.start()
        try:
            client, until = Client(port), time.monotonic() + START_S
            while client.ask("GET", "/readyz").status != 200:
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"serve run ended: {(Path(folder) / 'log').read_text()[-3000:]}")
                time.sleep(0.5)
            yield served
        finally:
            gateway.close()
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            serve.shutdown()  # there is nothing left of it, but this process remembers
            ray.shutdown()
            served.cluster.shutdown()
