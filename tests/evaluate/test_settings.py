"""A run's settings for sampling, from its configuration to what is sampled and measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Condition
from ddm_ray.data.loading.loader import load_rows
from ddm_ray.data.schema import HELDOUT
from ddm_ray.evaluate.losses import heldout_losses
from ddm_ray.evaluate.run import evaluate
from ddm_ray.run.graph import shard
from ddm_ray.run.run import Run
from ddm_ray.sampling.driver import Field
from ddm_ray.sampling.noise import initial_noise
from ddm_ray.sampling.request import SampleRequest, SampleResult
from ddm_ray.sampling.run_models import Models, load_models
from tests.random_run import make_run

pytestmark = pytest.mark.contract

LABELS = torch.arange(6)
ONE_STEP = SampleRequest(tuple(range(6)), LABELS, SamplingSettings(steps=1, solver="euler", strategy="full"))


def models_of(path: Path, *settings: str) -> tuple[Run, Models]:
    """A run whose router has opinions, and its mixture."""
    run = make_run(str(path), settings=settings, num_rows=200, spread=0.3)
    return run, load_models(run)


def one_step(models: Models, temperature: float) -> torch.Tensor:
    """noise - sum_k softmax(logits / temperature)_k velocity_k at t = 1."""
    noise, t_B = initial_noise(range(6), models.info.image_shape), torch.ones(6)
    assert models.router is not None
    with torch.inference_mode():
        probs_BK = (models.router(noise, t_B, LABELS) / temperature).softmax(dim=1)
        velocities = [call(models.experts[k], noise, t_B, LABELS) for k in range(models.info.num_experts)]
    assert (probs_BK.max(dim=1).values > 0.6).any()
    return noise - torch.einsum("bk,bkchw->bchw", probs_BK, torch.stack(velocities, dim=1))


def call(expert: Field | None, x_BCHW: torch.Tensor, t_B: torch.Tensor, condition: Condition) -> torch.Tensor:
    assert expert is not None
    return expert(x_BCHW, t_B, condition)


def test_the_routers_temperature_reaches_images_and_held_out_losses(tmp_path: Path) -> None:
    _, plain = models_of(tmp_path / "plain")
    run, warm = models_of(tmp_path / "warm", "sample={steps: 1, solver: euler, strategy: full, router_temperature: 2}")
    images = warm.sample(replace(ONE_STEP, settings=run.config.sample)).images_BCHW
    right = one_step(plain, 2.0)
    torch.testing.assert_close(images, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plain.sample(ONE_STEP).images_BCHW, one_step(plain, 1.0), atol=1e-5, rtol=1e-5)
    assert (one_step(plain, 1.0) - right).abs().max() > 0.01

    heldout = load_rows(run, [shard(0), shard(1)], HELDOUT)
    router, monolith = plain.router, load_models(run, "monolith")
    assert router is not None

    class Halved(torch.nn.Module):
        def forward(self, x_BCHW: torch.Tensor, t_B: torch.Tensor, condition: Condition) -> torch.Tensor:
            return router(x_BCHW, t_B, condition) / 2

    full = {
        name: {
            loss.model: loss.loss
            for loss in heldout_losses(models, {"monolith": monolith}, heldout, ["full"], 0, temperature)
        }["full"]
        for name, models, temperature in (
            ("plain", plain, 1.0),
            ("warm", warm, run.config.sample.router_temperature),
            ("halved", replace(plain, router=Halved()), 1.0),
        )
    }
    assert full["warm"] == pytest.approx(full["halved"], rel=1e-6)
    assert full["warm"] != pytest.approx(full["plain"], rel=1e-4)


def test_an_evaluation_samples_as_the_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = "sample={steps: 3, solver: heun, times: shifted-2, guidance_scale: 1.5, guidance_interval: [0.2, 0.7]}"
    settings = (setting, "sample.guidance_kind=per-expert", "evaluate.strategies=[full]", "evaluate.num_samples=20")
    run = make_run(str(tmp_path / "run"), settings=settings, num_rows=60)
    requests: list[SampleRequest] = []
    sample = Models.sample

    def recorded(models: Models, request: SampleRequest, *others: Any, **named: Any) -> SampleResult:
        requests.append(request)
        return sample(models, request, *others, **named)

    monkeypatch.setattr(Models, "sample", recorded)
    evaluate(run)
    # For the table, for the picture of the mixture and for the grid, of the monolith and of the mixture; then each
    # expert by itself.
    used = [request.settings.strategy for request in requests]
    assert (sorted(used[:2]), used[2:]) == (["full", "oracle"], [*["oracle", "full"] * 2, "oracle", "oracle"])
    for request in requests:
        assert request.settings == run.config.sample.changed(strategy=request.settings.strategy)
