"""No file of cluster_configs starts a Ray that answers whoever reaches it: read, and run with a stand-in for Ray."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from ddm_ray.ray_internals import NO_COUNTERS
from tests.conftest import ROOT

pytestmark = pytest.mark.contract

CONFIGS = ROOT / "cluster_configs"
KINDS = {"RayCluster", "RayJob", "RayService"}
TOKEN = "t" * 64


def starts(text: str) -> bool:
    """Whether it starts a Ray, and not only speaks of it."""
    code = re.sub(r"(^|\s)#.*", "", text, flags=re.MULTILINE)
    return bool(
        re.search(r"\bray start\b|start_ray\.py|machine\.sh|node\.sh|island\.sh", code)
        or re.search("^kind: Ray", text, re.M)
    )


def faults(text: str) -> list[str]:
    """Rays that a script or a file of Kubernetes's starts without a token."""
    if re.search("^kind:", text, re.MULTILINE):
        documents = [each for each in yaml.safe_load_all(text) if each and each["kind"] in KINDS]
        specs = [
            each["spec"].get("rayClusterSpec") or each["spec"].get("rayClusterConfig", each["spec"])
            for each in documents
        ]
        return [str(spec)[:60] for spec in specs if spec.get("authOptions", {}).get("mode") != "token"]
    code = re.sub(r"(^|\s)#.*", "", text, flags=re.MULTILINE)
    given = re.search(r"\bexport (\w+=\S+ )*RAY_AUTH_MODE=token\b", code)
    taken_back = re.search(r"RAY_AUTH_MODE=(?!token\b)|unset .*RAY_AUTH_MODE", code)
    return (
        []
        if given and not taken_back
        else [line for line in code.splitlines() if "ray start" in line or "start_ray.py" in line] or [code[:60]]
    )


FILES = [
    path
    for path in CONFIGS.rglob("*")
    if path.is_file() and path.suffix not in (".md", ".py") and starts(path.read_text())
]


def test_all_that_start_a_ray_are_read() -> None:
    names = {path.relative_to(CONFIGS).as_posix() for path in FILES}
    assert names >= {"local/island.sh", "local/islands.sh", "slices/node.sh", "machine.sh"}
    assert names >= {"slurm/island.sbatch", "aws/cluster.yaml"}
    assert names >= {
        "skypilot/island.yaml",
        "kuberay/rayjob.yaml",
        "kuberay/raycluster.yaml",
        "kuberay/rayservice.yaml",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_ray_asks_for_a_token(path: Path) -> None:
    text = path.read_text()
    assert not faults(text)
    for change in (
        ("RAY_AUTH_MODE=token", ""),
        ("RAY_AUTH_MODE=token", "RAY_AUTH_MODE=disabled"),
        ("mode: token", "mode: none"),
    ):
        changed = text.replace(*change)
        assert changed == text or faults(changed), change


@pytest.mark.parametrize(
    "command", ["local/island.sh 7 1", "slices/node.sh head", "slices/node.sh 127.0.0.1:1 a 1", "machine.sh 20000 head"]
)
def test_scripts_start_ray_with_a_token_and_without_counters(tmp_path: Path, command: str) -> None:
    ray = tmp_path / "bin/ray"
    ray.parent.mkdir()
    ray.write_text('#!/bin/sh\nenv\nprintf "WORDS=%s\\n" "$*"\n')
    ray.chmod(0o755)
    script, *words = command.split()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**kept, "HOME": str(tmp_path), "PATH": f"{ray.parent}:{kept['PATH']}", "RAY_AUTH_MODE": "disabled"}

    def run(**variables: str) -> dict[str, str]:
        done = subprocess.run(
            [str(CONFIGS / script), *words],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        for folder in re.findall(r"--temp-dir (\S+)/ray ", done.stdout):
            Path(folder).rmdir()
        return dict(line.partition("=")[::2] for line in done.stdout.splitlines())

    started = run(RAY_AUTH_TOKEN=TOKEN)
    assert started["RAY_AUTH_MODE"] == "token" and started["WORDS"].startswith("start ")
    assert started.get("RAY_AUTH_TOKEN") == TOKEN or len(Path(started["RAY_AUTH_TOKEN_PATH"]).read_text()) == 64
    assert TOKEN not in started["WORDS"]
    assert {name: started[name] for name in NO_COUNTERS} == NO_COUNTERS
    assert run(RAY_AUTH_TOKEN=TOKEN, RAY_enable_metrics_collection="1")["RAY_enable_metrics_collection"] == "1"
