"""Calls of an ordinary pipeline: what is done after each step, and models that are elsewhere until they are called."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.callbacks import PipelineCallback, SDCFGCutoffCallback

from ddm_ray.core.flow import Flow
from ddm_ray.core.solvers import SOLVERS
from ddm_ray.core.times import time_grid
from ddm_ray.sampling.dense_export import dense_pipeline
from tests.pretend_gpu import PretendGPU
from tests.sampling import tiny_components
from tests.sampling.exports import LABELS, SEEDS, TEXTS, dense


class Recorder(PipelineCallback):
    """Latents after each step, with the step's number and time."""

    tensor_inputs = ["latents"]  # noqa: RUF012

    def __init__(self, change: dict[int, Any] | None = None, stop: int | None = None) -> None:
        super().__init__()
        self.change, self.stop = change or {}, stop
        self.steps: list[int] = []
        self.times: list[float] = []
        self.latents: list[torch.Tensor] = []

    def callback_fn(self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: Any) -> dict[str, Any]:
        self.steps.append(step_index)
        self.times.append(timesteps)
        self.latents.append(callback_kwargs["latents"])
        pipeline._interrupt = step_index == self.stop
        return {"latents": self.change[step_index]} if step_index in self.change else {}


def of_classes(folder: Path, **settings: Any) -> Any:
    pipeline = dense_pipeline(dense(folder, Flow(), settings, False).components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def of_texts(folder: Path) -> Any:
    """A guided pipeline of all components, two text encoders among them."""
    components = dense(folder, Flow(), {"steps": 2, "guidance_scale": 3.0}, True).components
    assert components.text_encoder is not None
    components.text_encoder.pooled = tiny_components.text_encoder(folder / "pooled", seed=1)
    pipeline = dense_pipeline(components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents(pipeline: Any, callback: Any = None, **more: Any) -> torch.Tensor:
    call = {**LABELS, "seeds": SEEDS, "output_type": "latent", **more}
    return pipeline(**call, callback_on_step_end=callback).images


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_callback_is_called_after_each_step(solver: str, tmp_path: Path) -> None:
    """Once a step, however many velocities it asks for; and it changes nothing by being there."""
    pipeline, recorder = of_classes(tmp_path, steps=4, solver=solver, guidance_scale=2.0), Recorder()
    last = latents(pipeline, recorder)
    assert recorder.steps == [0, 1, 2, 3] and pipeline.num_timesteps == 4
    assert recorder.times == time_grid("uniform", 4)[:-1].tolist()
    assert torch.equal(recorder.latents[-1], last) and torch.equal(latents(pipeline), last)
    fewer = Recorder()
    latents(pipeline, fewer, num_inference_steps=1)
    assert fewer.steps == [0] and pipeline.num_timesteps == 1


@pytest.mark.parametrize("solver", ["euler", "heun", "midpoint", "rk4"])
def test_a_callback_changes_latents(solver: str, tmp_path: Path) -> None:
    """Latents of another image after the second step lead to that image's end: these solvers remember nothing else."""
    pipeline, other = of_classes(tmp_path, steps=4, solver=solver), Recorder()
    end = latents(pipeline, other, seeds=SEEDS[::-1])
    assert not torch.equal(latents(pipeline), end)
    assert torch.equal(latents(pipeline, Recorder({1: other.latents[1]})), end)


def test_a_callback_interrupts(tmp_path: Path) -> None:
    """After the step at hand, whose latents become the images; the next call knows nothing of it."""
    pipeline, recorder = of_classes(tmp_path, steps=5, solver="heun"), Recorder(stop=1)
    last = latents(pipeline, recorder)
    assert recorder.steps == [0, 1] and torch.equal(last, recorder.latents[1]) and pipeline.interrupt
    again = Recorder()
    latents(pipeline, again)
    assert again.steps == [0, 1, 2, 3, 4] and not pipeline.interrupt


def test_callbacks_have_tensors_of_the_pipeline_only(tmp_path: Path) -> None:
    pipeline, kinds = of_classes(tmp_path, steps=1), []

    def note(_pipeline: Any, _step: int, _t: float, tensors: dict[str, Any]) -> dict[str, Any]:
        kinds.append(sorted(tensors))
        return tensors

    latents(pipeline, note)
    latents(pipeline, note, callback_on_step_end_tensor_inputs=[])
    assert kinds == [["latents"], []]
    with pytest.raises(ValueError, match="no tensor 'prompt_embeds' for callbacks"):
        latents(pipeline, note, callback_on_step_end_tensor_inputs=["prompt_embeds"])
    with pytest.raises(ValueError, match="for callbacks"):
        latents(pipeline, SDCFGCutoffCallback())


def test_models_are_called_in_the_order_of_their_offloading(tmp_path: Path) -> None:
    """Each model's calls follow each other, so that it comes to the device once, in the order that is declared."""
    pipeline, calls = of_texts(tmp_path), []
    order = pipeline.model_cpu_offload_seq.split("->")
    modules = {name for name, each in pipeline.components.items() if isinstance(each, torch.nn.Module)}
    assert modules == {*order}
    for name in order:
        module = pipeline.vae.decoder if name == "vae" else getattr(pipeline, name)
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    pipeline(**TEXTS, seeds=SEEDS)
    assert [name for name, _ in groupby(calls)] == order


@pytest.mark.chaos
def test_models_are_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By accelerate, each alone on a pretended GPU, where no tensor of the CPU may join; after a call none is there."""
    pytest.importorskip("accelerate", reason="offloading is accelerate's, which no extra brings along")
    pipeline, on_gpu = of_texts(tmp_path), []
    models = {name: each for name, each in pipeline.components.items() if isinstance(each, torch.nn.Module)}
    ours = pipeline(**TEXTS, seeds=SEEDS, output_type="pt").images

    def places() -> list[str]:
        return [name for name, model in models.items() if next(model.parameters()).is_meta]

    for name, model in models.items():
        module = model.decoder if name == "vae" else model
        module.register_forward_hook(lambda *_, name=name: on_gpu.append((name, places())))
    monkeypatch.setattr(torch, "meta", torch.cpu, raising=False)  # asked to empty the device's cache
    with PretendGPU(), torch.no_grad():
        pipeline.enable_model_cpu_offload(device="meta")
        images = [pipeline(**TEXTS, seeds=SEEDS, output_type="pt").images.cpu() for _ in range(2)]
        assert not places()
    assert {name for name, _ in on_gpu} == {*models}
    assert all(those == [name] for name, those in on_gpu), on_gpu
    for theirs in images:
        assert torch.allclose(theirs, ours, atol=2e-6)
