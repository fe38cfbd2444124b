"""`serve deploy` of a run with one expert more, and back by the pin file: no image is lost, mixed or without an expert.

On a real Ray Serve, with each expert in a deployment of its own, and a gateway.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.run.graph import rows_of
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_models
from ddm_ray.serve.http.responses import image_file
from tests.conftest import wait_for
from tests.data.appended import make_base, write_digits
from tests.derived import derive
from tests.random_run import publish_models
from tests.serve.cluster.test_live_weights import STRATEGIES, Clients, settings_of
from tests.serve.conftest import free_port, pixels, serving

pytestmark = pytest.mark.chaos

PATIENCE_S = 120.0
DEPLOY = """
import json, sys, time
from pathlib import Path
from ddm_ray.environment import prepare_serve
prepare_serve(direct_ingress=True)
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ServeDeploySchema
from ddm_ray.ray_internals import SERVE_CLIENT
from ddm_ray.serve.cluster.direct_ingress import local_replicas
from ddm_ray.serve.cluster.gateway import Gateway
from ddm_ray.serve.cluster.haproxy import find_haproxy
config, inner, outer, temp = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ray.init(address="local", num_cpus=4, include_dashboard=False, _temp_dir=f"{temp}/ray", log_to_driver=False)
serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=inner))
gateway, deployed, shown = None, None, None
try:
    while True:
        if (text := config.read_text()) != deployed:
            SERVE_CLIENT.get()().deploy_apps(ServeDeploySchema.model_validate(json.loads(text)))
            deployed = text
        application = serve.status().applications["ddm"]
        states = {name: dict(each.replica_states) for name, each in application.deployments.items()}
        if gateway is None and states.get("api", {}).get("RUNNING"):
            gateway = Gateway("127.0.0.1", outer, [("127.0.0.1", inner)], find_haproxy())
            gateway.start(local_replicas("ddm", inner))
        config.with_suffix(".seen").write_text(json.dumps({"status": application.status, **states}))
        time.sleep(0.2)
except KeyboardInterrupt:
    gateway.close()
    serve.shutdown()
"""


def config_of(run: Run, pin_file: Path) -> str:
    """Serve's configuration of a run: an update starts the next replica before the one before stops."""
    args = {"run": run.url, "placement": "per-expert", "local": True, "refresh_s": 0.2, "pin_file": str(pin_file)}
    names = ["api", *(f"expert-{cluster:03d}" for cluster in run.config.partition.clusters)]
    parts: list[dict[str, Any]] = [{"name": name, "max_surge_percent": 100} for name in names]
    application = {"name": "ddm", "import_path": "ddm_ray.serve.cluster.app:build_app", "args": args}
    return json.dumps({"applications": [{**application, "route_prefix": "/", "deployments": parts}]})


def images(run: Run) -> dict[str, np.ndarray]:
    models = load_models(run)
    asked = {each: SampleRequest((2,), torch.tensor([1]), settings_of(each)) for each in STRATEGIES}
    return {each: pixels(image_file(models.sample(request).images_BCHW[0], 1)) for each, request in asked.items()}


def test_an_expert_joins_by_an_update_and_leaves_by_the_pin_file(tmp_path: Path) -> None:
    first = make_base(tmp_path)
    write_digits(tmp_path / "scans", range(300, 330), inverted=True)
    joined = derive(first, url=str(tmp_path / "joined"), add=((str(tmp_path / "scans"), 1),))
    for artifact in rows_of(joined.config):
        prepare(joined, cluster=artifact.cluster, execute=serial)
    partition(joined)
    publish_models(joined, spread=0.2)
    config, pin_file, inner, outer = tmp_path / "config.json", tmp_path / "pins.yaml", free_port(), free_port()

    def states() -> dict[str, Any]:
        try:
            return dict(json.loads(config.with_suffix(".seen").read_text()))
        except json.JSONDecodeError:  # it is being written
            return {}

    def settled(run: Run) -> bool:
        names = {"api", *(f"expert-{cluster:03d}" for cluster in run.config.partition.clusters)}
        return states() == {"status": "RUNNING", **{name: {"RUNNING": 1} for name in names}}

    config.write_text(config_of(first, pin_file))
    with TemporaryDirectory(prefix="ddm", dir="/tmp", ignore_cleanup_errors=True) as temp:
        command = [sys.executable, "-c", DEPLOY, str(config), str(inner), str(outer), temp]
        made = {"first": images(first), "joined": images(joined)}
        with serving(command, outer, tmp_path) as server, Clients(server, made) as clients:
            clients.until("first")
            config.write_text(config_of(joined, pin_file))
            clients.until("joined")
            wait_for(lambda: settled(joined), PATIENCE_S)
            pin_file.write_text(f"run: {first.url}\n")
            clients.until("first")
            config.write_text(config_of(first, pin_file))
            wait_for(lambda: settled(first), PATIENCE_S)
            clients.until("first")
            assert server.ask("GET", "/readyz").status == 200
    assert not clients.wrong, clients.wrong[:3]
    assert {degraded for _, _, degraded in clients.made} == {""}
