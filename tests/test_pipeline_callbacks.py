"""Callbacks of a DDMPipeline in diffusers' form: they see each step, may change latents, and may end it all."""

from typing import Any

import pytest
import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback, SDCFGCutoffCallback
from torch import Tensor

from ddm_ray.core.times import time_grid
from ddm_ray.errors import SamplingError
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.run import Run
from ddm_ray.sampling.noise import initial_noise
from tests.random_run import make_run

CALL = {"class_labels": [1, 2, 3], "seeds": 1, "num_inference_steps": 4, "output_type": "latent"}
STRATEGIES = ["once", "full", "top-1", "sticky"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("callbacks") / "run"), num_rows=40)


@pytest.fixture(scope="module")
def pipeline(run: Run) -> DDMPipeline:
    return DDMPipeline.from_run(run)


class Halving(PipelineCallback):
    """Halves the latents after the first step."""

    tensor_inputs = ["latents"]  # noqa: RUF012

    def callback_fn(self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: Any) -> dict[str, Any]:
        if step_index == 0:
            callback_kwargs["latents"] = callback_kwargs["latents"] / 2
        return callback_kwargs


def latents(pipeline: DDMPipeline, **changes: Any) -> Tensor:
    images = pipeline(**CALL | changes).images
    assert isinstance(images, Tensor)
    return images


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("solver", ["euler", "heun", "ab2"])
def test_a_callback_that_changes_nothing_changes_no_bit(pipeline: DDMPipeline, strategy: str, solver: str) -> None:
    call = {"strategy": strategy, "solver": solver, "guidance_scale": 2.0}
    right = latents(pipeline, **call)
    for same in (lambda *step: None, lambda *step: step[3], lambda *step: {}):
        assert torch.equal(latents(pipeline, callback_on_step_end=same, **call), right)


def test_changed_latents_are_what_the_next_step_begins_at(run: Run) -> None:
    """Against Euler's method by hand, with the network itself."""
    monolith = DDMPipeline.from_run(run, model="monolith")
    (network,) = monolith.models.experts
    times_S, x_BCHW = time_grid("uniform", 4), initial_noise([1, 2, 3], (1, 8, 8))
    with torch.inference_mode():
        for step in range(4):
            t = float(times_S[step])
            x_BCHW = x_BCHW + (float(times_S[step + 1]) - t) * network(
                x_BCHW, torch.full((3,), t), torch.tensor([1, 2, 3])
            )
            x_BCHW = x_BCHW / 2 if step == 0 else x_BCHW
    call = {"times": "uniform", "solver": "euler"}
    for callback in (Halving(), MultiPipelineCallbacks([Halving()])):
        torch.testing.assert_close(latents(monolith, callback_on_step_end=callback, **call), x_BCHW, atol=1e-5, rtol=0)

    def in_place(caller: DDMPipeline, step: int, t: float, tensors: dict[str, Tensor]) -> None:
        if step == 0:
            tensors["latents"].mul_(0.5)

    assert torch.equal(
        latents(monolith, callback_on_step_end=in_place, **call),
        latents(monolith, callback_on_step_end=Halving(), **call),
    )


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_an_interrupt_leaves_images_as_they_are(run: Run, offload: Any, solver: str) -> None:
    pipeline = DDMPipeline.from_run(run, offload=offload)
    seen: list[Tensor] = []

    def stop(caller: DDMPipeline, step: int, t: float, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(tensors["latents"].clone())
        caller._interrupt = step == 1
        return tensors

    call = {"batch_size": 2, "solver": solver, "strategy": "oracle", "clusters": 0}
    output = pipeline(**CALL | call, callback_on_step_end=stop)
    assert len(seen) == 2
    assert pipeline.interrupt
    assert torch.equal(output.images[:2], seen[1])
    assert torch.equal(output.images[2], initial_noise([3], (1, 8, 8))[0])
    assert output.routing_SBK[:, :, 0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    again = latents(pipeline, callback_on_step_end=lambda *step: seen.append(step[3]["latents"]), **call)
    assert not pipeline.interrupt
    assert pipeline.num_timesteps == 4
    assert torch.equal(again, latents(pipeline, **call))


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            lambda *step: "done",
            "callback_on_step_end returned a str: let it return the dict that it was given, or None",
        ),
        (lambda *step: {"latents": torch.zeros(2, 1, 8, 8)}, r"latents of \(2, 1, 8, 8\): they are of \(3, 1, 8, 8\)"),
        (lambda *step: {"latents": None}, r"latents of NoneType: they are of \(3, 1, 8, 8\)"),
        (lambda *step: {"latents": step[3]["latents"] / 0}, "left latents that aren't finite"),
        (SDCFGCutoffCallback(), "no tensor 'prompt_embeds': use latents; guidance is ended by guidance_interval"),
    ],
)
def test_what_a_callback_cannot_do_is_said(pipeline: DDMPipeline, callback: Any, message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        latents(pipeline, callback_on_step_end=callback)


def test_a_callback_is_given_the_tensors_that_it_names(pipeline: DDMPipeline) -> None:
    given: list[dict[str, Tensor]] = []
    latents(pipeline, callback_on_step_end=lambda *step: given.append(step[3]), callback_on_step_end_tensor_inputs=[])
    assert given == [{}] * 4
    with pytest.raises(SamplingError, match="no tensor 'noise_pred': use latents"):
        latents(pipeline, callback_on_step_end_tensor_inputs=["noise_pred"])
