"""serving/mixture.yaml through `serve run`, as its first lines tell the user."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.random_run import make_run
from tests.serve.conftest import ROOT, free_port, serving

pytestmark = pytest.mark.chaos


def test_serve_run_deploys_the_mixture(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "digits"), "digits", num_rows=80)
    config = yaml.safe_load((ROOT / "serving" / "mixture.yaml").read_text())
    port = free_port()
    config["http_options"]["port"] = port
    config["applications"][0]["args"]["run"] = os.path.relpath(run.url, ROOT)  # relative, as in the file
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(config))
    serve = str(Path(sys.executable).with_name("serve"))
    command = [serve, "run", str(tmp_path / "mixture.yaml"), "--address", "local"]
    with serving(command, port, tmp_path) as server:
        assert server.ask("GET", "/healthz").json["experts"] == [f"expert-{cluster:03d}" for cluster in range(4)]
        answer = server.generate(prompt="8", n=8, seed=1, steps=4)
        assert answer.status == 200 and len(answer.json["data"]) == 8
        assert len({way[0]["expert"] for way in answer.json["experts"]}) > 1
        service = next(yaml.safe_load_all((ROOT / "cluster_configs/kuberay/rayservice.yaml").read_text()))
        (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        probe = group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
        for path in (probe["path"], "/readyz"):
            assert server.ask("GET", path).status == 200, path
