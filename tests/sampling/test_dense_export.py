"""Dense models as ordinary pipelines: diffusers opens them without ddm-ray, and paints our images."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.core.flow import Flow
from ddm_ray.errors import SamplingError
from ddm_ray.run.graph import MONOLITH
from ddm_ray.sampling.dense_export import save_dense
from tests.random_run import make_run
from tests.sampling.exports import LABELS, SEEDS, TEXTS, dense, run_alone

pytestmark = pytest.mark.contract

OPENED = """
for folder, call in given.items():
    pipeline = opened(folder)
    images = pipeline(**call, seeds=SEEDS, output_type="pt").images
    torch.save(images, folder + ".pt")
    noise = torch.randn(4, *images.shape[1:], generator=torch.manual_seed(3)) if pipeline.vae is None else None
    if noise is not None:
        noised = pipeline(**call, latents=noise, output_type="pt").images
        drawn = pipeline(**call, generator=torch.manual_seed(3), output_type="pt").images
        assert torch.equal(noised, drawn) and not torch.equal(noised, images)
    assert pipeline(**call, seeds=SEEDS, num_inference_steps=1).images[3].size == images.shape[:1:-1]
    half = opened(folder, torch_dtype=torch.bfloat16)
    rounded = half(**call, seeds=SEEDS, output_type="pt").images.float()
    assert 0 < (rounded - images).abs().mean() < 0.05, (rounded - images).abs().mean()
    if pipeline.config.num_classes:
        x, t = torch.randn(2, *images.shape[1:]), torch.full((2,), 0.5)
        null = torch.full((2,), pipeline.config.num_classes)
        assert torch.equal(pipeline.transformer(x, t).sample, pipeline.transformer(x, t, null).sample)
        assert not torch.equal(pipeline.transformer(x, t).sample, pipeline.transformer(x, t, 0 * null).sample)
    for wrong in ({"class_labels": "nobody"}, {"prompt": 5}, {**call, "seeds": [1]}, {"class_labels": 9}):
        try:
            pipeline(**wrong)
        except (ValueError, TypeError):
            continue
        sys.exit(f"{wrong} is taken")
"""
CASES: dict[str, tuple[Flow, dict[str, Any], dict[str, Any]]] = {
    "plain": (Flow(), {"steps": 5}, LABELS),
    "other-path": (Flow("cosine", "noise"), {"steps": 4, "solver": "heun", "guidance_scale": 0.0}, LABELS),
    "guided": (
        Flow("ddpm", "data"),
        {"steps": 9, "times": "shifted-2", "guidance_scale": 2.5, "guidance_interval": (0.2, 0.7)},
        LABELS,
    ),
    "history": (Flow(), {"steps": 5, "solver": "ab3", "guidance_scale": 2.5, "guidance_interval": (0.2, 0.7)}, LABELS),
    "drawn": (Flow(), {"steps": 5, "solver": "ancestral"}, LABELS),
    "texts": (Flow(), {"steps": 3, "solver": "midpoint", "guidance_scale": 3.0}, TEXTS),
}


def test_diffusers_alone_paints_the_same_images(tmp_path: Path) -> None:
    """In a process that can't import ddm-ray: of other paths, solvers, guidance and intervals, and of texts."""
    calls, images = {}, {}
    for name, (flow, settings, call) in CASES.items():
        pipeline, folder = dense(tmp_path / name, flow, settings, name == "texts"), str(tmp_path / f"{name}-dense")
        save_dense(pipeline.components, "a card", folder)
        calls[folder] = call
        images[folder] = pipeline(**call, seeds=SEEDS, output_type="pt").images
    run_alone(OPENED, calls, tmp_path / "home")
    for folder, ours in images.items():
        theirs = torch.load(f"{folder}.pt")
        assert ours.std() > 0.05 and torch.allclose(ours, theirs, atol=2e-6), folder


def test_a_mixture_is_no_dense_model(tmp_path: Path) -> None:
    components = dense(tmp_path, Flow(), {}, False, experts=2).components
    with pytest.raises(SamplingError, match="2 experts are no dense model"):
        save_dense(components, "", tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_models_without_a_null_condition_say_so(tmp_path: Path) -> None:
    from ddm_ray.sampling.dense_pipeline import DensePipeline

    components = dense(tmp_path, Flow(), {}, False).components
    info = replace(components.models.info, trained_null=False)
    save_dense(replace(components, models=replace(components.models, info=info)), "", tmp_path / "dense")
    assert json.loads((tmp_path / "dense/model_index.json").read_text())["knows_null"] is False
    pipeline = DensePipeline(components.models.experts[0], *[None] * 5, num_classes=3, knows_null=False)
    for call in ({"class_labels": 1, "guidance_scale": 2.0}, {"class_labels": [None]}):
        with pytest.raises(ValueError, match=r"without a null condition|no class None"):
            pipeline(**call)


def test_a_runs_monolith_is_exported_with_its_card(tmp_path: Path) -> None:
    """As a user does it: once, not over what is there, and again where asked to."""
    run, folder = make_run(str(tmp_path / "run")), tmp_path / "mono"
    line = ["export", run.url, str(folder), "--model", "monolith"]

    def say(*more: str) -> str:
        return CliRunner().invoke(main, [*line, *more], catch_exceptions=False).output

    assert "a pipeline that diffusers opens without ddm-ray" in say("--license", "cc-by-4.0")
    card = (folder / "README.md").read_text()
    assert "\nlicense: cc-by-4.0\n" in card and "| parts of the data, and experts (K) | 2 |" in card
    assert "No finished evaluation of the run has measured this model." in card
    parameters = run.require(MONOLITH).info["parameters"]
    assert f"| parameters | {parameters:,} |" in card
    assert "is a pipeline already: use --overwrite" in say()
    say("--overwrite")
    assert "\nlicense: unknown\n" in (folder / "README.md").read_text()
    refused = CliRunner().invoke(main, ["sample", str(folder)])
    assert refused.exit_code == 1 and "is an ordinary pipeline: open it with diffusers" in refused.output


AGAIN = """
for folder, call in given.items():
    pipeline = opened(folder)
    images = pipeline(**call, seeds=SEEDS, output_type="pt").images
    for options in ({}, {"safe_serialization": False}, {"variant": "fp16"}, {"max_shard_size": "20KB"}):
        folder += "-again"
        pipeline.save_pretrained(folder, **options)
        pipeline = opened(folder, variant=options.get("variant"))
        assert torch.equal(pipeline(**call, seeds=SEEDS, output_type="pt").images, images), options
"""


def test_what_diffusers_saves_again_it_opens_again(tmp_path: Path) -> None:
    """In other forms of weights, too; the last folder in a process that has seen nothing of the first one's code."""
    calls = {}
    for name, call in (("labels", LABELS), ("texts", TEXTS)):
        pipeline, folder = dense(tmp_path / name, Flow(), {"steps": 2}, name == "texts"), tmp_path / f"{name}-dense"
        save_dense(pipeline.components, "a card", folder)
        calls[str(folder)] = call
    run_alone(AGAIN, calls, tmp_path / "home")
    last = {f"{folder}{4 * '-again'}": call for folder, call in calls.items()}
    run_alone("for folder, call in given.items(): opened(folder)(**call, seeds=SEEDS)", last, tmp_path / "other-home")
