"""A network is built only as the run's configuration says, whatever its files say of themselves."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from ddm_ray.errors import CorruptArtifact
from ddm_ray.models import weights
from ddm_ray.models.spec import spec_of
from ddm_ray.run.graph import ROUTER, Artifact, expert
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.manifest import NAME, FileRecord, Manifest
from ddm_ray.run.run import Run
from ddm_ray.sampling import run_models
from ddm_ray.sampling.run_models import load_trained
from tests.random_run import make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("made") / "run"), num_rows=60)


def alter(run: Run, artifact: Artifact, name: str, change: Callable[[bytes], bytes]) -> None:
    """Alter a file of a finished artifact, and its manifest with it."""
    manifest = run.require(artifact)
    key = f"{TrainedInfo.of(manifest).weights}/{name}"
    data = change(run.store.read(f"{artifact}/{key}"))
    run.store.write(f"{artifact}/{key}", data)
    resign(run, manifest, key, FileRecord.of(data))


def resign(run: Run, manifest: Manifest, key: str, record: FileRecord) -> None:
    files = {**manifest.files, key: record}
    changed = Manifest(manifest.artifact, manifest.identity, files, manifest.info)
    run.store.write(f"{manifest.artifact}/{NAME}", changed.to_json())


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    shutil.copytree(made.url, tmp_path / "run")
    return Run.open(str(tmp_path / "run"))


@pytest.mark.parametrize("artifact", [expert(0), ROUTER])
@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda spec: spec["config"].update(depth=10**7), r"config\.depth: 10000000 -> \d+"),
        (lambda spec: spec["config"].update(width=[1]), r"config\.width: \[1\] -> \d+"),
        (lambda spec: spec["config"].update(x="\x1b[2J"), r'config\.x: "\\u001b\[2J" -> null'),
        (lambda spec: spec.update({"class": "Other"}), r'class: "Other" -> "(DiT|Router)"'),
        (lambda spec: spec.update(flow={"path": "cosine", "prediction": "noise"}), r'flow\.path: "cosine" -> "linear"'),
        (lambda spec: spec.pop("config"), r"config: null -> \{"),
    ],
)
def test_another_network_is_refused_before_it_is_built(
    run: Run, artifact: Artifact, change: Callable[[Any], Any], differs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def altered(data: bytes) -> bytes:
        spec = json.loads(data)
        change(spec)
        return json.dumps(spec).encode()

    load_trained(run, artifact)
    alter(run, artifact, "model.json", altered)
    build, built = weights.build, list[Any]()
    monkeypatch.setattr(weights, "build", lambda spec, *device: built.append(spec) or build(spec, *device))
    with pytest.raises(CorruptArtifact, match=rf"{artifact}/.*/model\.json: isn't the run's network: {differs}"):
        load_trained(run, artifact)
    assert all(spec == spec_of(run.config, artifact.kind) for spec in built)


def test_what_a_spec_leaves_to_its_class_is_no_difference(run: Run) -> None:
    def shortened(data: bytes) -> bytes:
        spec = json.loads(data)
        config = {name: value for name, value in spec["config"].items() if value is not None}
        assert config != spec["config"]
        return json.dumps({**spec, "config": config}).encode()

    before = load_trained(run, expert(0)).state_dict()
    alter(run, expert(0), "model.json", shortened)
    assert all(torch.equal(before[name], tensor) for name, tensor in load_trained(run, expert(0)).state_dict().items())


def test_numbers_that_are_not_finite_are_refused(run: Run) -> None:
    def poisoned(data: bytes) -> bytes:
        tensors = load(data)
        tensors["head.bias"][0] = float("nan")
        return save(tensors)

    alter(run, expert(1), "ema.safetensors", poisoned)
    with pytest.raises(CorruptArtifact, match=r"experts/001.*tensor head\.bias has numbers that aren't finite"):
        load_trained(run, expert(1))


@pytest.mark.parametrize("name", run_models.NETWORK)
def test_files_that_are_larger_than_the_network_are_not_read(run: Run, name: str) -> None:
    manifest = run.require(expert(0))
    key = f"{TrainedInfo.of(manifest).weights}/{name}"
    resign(run, manifest, key, FileRecord(10**11, "0" * 64))
    with pytest.raises(CorruptArtifact, match=rf"{name}: has {10**11} bytes, and the run's network \d+ at most"):
        load_trained(run, expert(0))
