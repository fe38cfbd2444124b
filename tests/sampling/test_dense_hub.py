"""Exports on a hub, and several in one process: all that a pipeline needs is fetched, and none has another's code."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddm_ray.core.flow import Flow
from ddm_ray.sampling import dense_export, noise
from ddm_ray.sampling.dense_export import save_dense
from ddm_ray.sampling.single_file import single_file
from tests.data.hub import COMMIT, hub_server
from tests.sampling.exports import LABELS, SEEDS, TEXTS, dense, run_alone

OPENED = """
for name, (call, file) in given["fetched"].items():
    torch.save(opened(name)(**call, seeds=SEEDS, output_type="pt").images, file)
pipelines = {folder: opened(folder) for folder in given["versions"]}
for _ in range(2):
    for folder, call in given["versions"].items():
        torch.save(pipelines[folder](**call, seeds=SEEDS, output_type="pt").images, folder + ".pt")
    opened(folder)  # runs the last one's code again, in the module that it has
"""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "labels": ({"steps": 4, "guidance_scale": 2.5, "guidance_interval": (0.2, 0.7)}, LABELS),
    "texts": ({"steps": 3}, TEXTS),
}
CHANGES = {
    "ours": ("", ""),
    "double": ("unconditional + by *", "unconditional + 2 * by *"),
    "still": ("return_dict else (velocity_BCHW,)", "return_dict else (0 * velocity_BCHW,)"),
}


@pytest.mark.chaos
def test_exports_are_opened_by_name_and_keep_to_their_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process: two by their repositories' names, from an empty cache; and three of several versions, opened
    before any paints: ours, one that guides twice as much, and a network that is still.
    """
    repositories, fetched, expected = {}, {}, {}
    for name, (settings, call) in CASES.items():
        pipeline, folder = dense(tmp_path / name, Flow("cosine"), settings, name == "texts"), tmp_path / f"{name}-dense"
        save_dense(pipeline.components, "a card", folder)
        files = [file for file in folder.rglob("*") if file.is_file()]
        repositories[f"lab/{name}"] = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
        fetched[f"lab/{name}"] = call, str(tmp_path / f"{name}.pt")
        expected[name] = pipeline(**call, seeds=SEEDS, output_type="pt").images
    pipeline = dense(tmp_path, Flow("cosine", "data"), {"steps": 3, "guidance_scale": 1.5}, False)
    source = dense_export.single_file
    for name, (old, new) in CHANGES.items():
        monkeypatch.setattr(dense_export, "single_file", lambda *modules, o=old, n=new: source(*modules).replace(o, n))
        save_dense(pipeline.components, "a card", tmp_path / name)
    expected["ours"] = pipeline(**LABELS, seeds=SEEDS, output_type="pt").images
    expected["double"] = pipeline(**LABELS, seeds=SEEDS, guidance_scale=3.0, output_type="pt").images
    expected["still"] = (noise.initial_noise(SEEDS, (3, 4, 4)) / 2 + 0.5).clamp(0, 1)
    given = {"fetched": fetched, "versions": {str(tmp_path / name): LABELS for name in CHANGES}}
    with hub_server(repositories) as url:
        log = run_alone(OPENED, given, tmp_path / "home", HF_ENDPOINT=url, HF_HUB_OFFLINE="0")
    assert "Expected types" not in log and "are not expected" not in log, log
    for name, images in expected.items():
        assert images.std() > 0.05 and torch.allclose(images, torch.load(tmp_path / f"{name}.pt"), atol=2e-6), name
    assert (expected["ours"] - expected["double"]).abs().max() > 0.05
    for name in CASES:
        snapshot = tmp_path / f"home/hub/models--lab--{name}/snapshots" / COMMIT
        code = sorted(file.relative_to(snapshot).parent.as_posix() for file in snapshot.rglob("*.py"))
        assert code == [".", "transformer"], code


def test_one_file_holds_one_meaning_of_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable, with no import of ours left; a name that two modules mean otherwise is refused."""
    code = single_file(dense_export.PIPELINE)
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imported and not [node for node in imported if "ddm_ray" in ast.unparse(node)]
    assert code == single_file(dense_export.PIPELINE) != single_file(dense_export.TRANSFORMER)
    monkeypatch.setattr(noise, "torch", np)
    with pytest.raises(AssertionError, match="torch has two meanings"):
        single_file(dense_export.PIPELINE)
