"""Compilation that nobody asked for: where it is, and that a training goes on where it fails."""

import pytest
import torch

from ddm_ray.config import TrainConfig
from ddm_ray.core.flow import Flow
from ddm_ray.models import compiled
from ddm_ray.placement import TrainPlacement
from ddm_ray.train import engine as engines
from ddm_ray.train.objectives import Batch, ExpertLoss
from tests.counted_graphs import counted_graphs
from tests.models.test_text_condition import CLASSES, condition, inputs, perturbed

TRAIN = TrainConfig.model_validate({"steps": 10, "global_batch": 4, "precision": "bf16"})


@pytest.mark.parametrize(
    ("asked", "device", "zero_stage", "lacks", "expected"),
    [
        (None, "cuda", 1, None, True),
        (None, "cuda", 2, None, True),
        (None, "cuda", 3, None, False),
        (None, "cuda", 1, "compiler", False),
        (None, "cuda", 1, "triton", False),
        (None, "cpu", 1, None, False),
        (False, "cuda", 1, None, False),
        (True, "cpu", 1, None, True),
    ],
)
def test_a_gpu_that_can_compiles(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, device: str, zero_stage: int, lacks: str | None, expected: bool
) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None if lacks == "compiler" else name)
    monkeypatch.setattr(compiled, "find_spec", lambda name: None if lacks == name else object())
    assert compiled.compiles(asked, torch.device(device), zero_stage) is expected


@pytest.mark.parametrize("asked", [None, True])
def test_what_cannot_be_compiled_runs_as_it_is_where_nobody_asked(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch, asked: bool | None
) -> None:
    """By a compiler that fails at everything: losses and norms to the bit, but for the update's rounding."""
    (noise_BCHW, t_B), label_B = inputs(), condition(CLASSES)
    batch = Batch(noise_BCHW.flip(0).sin(), noise_BCHW, t_B, label_B, torch.zeros_like(label_B))

    def curve(compile: bool | None) -> list[tuple[float, float]]:
        engine = engines.Engine(perturbed(**CLASSES), TRAIN, TrainPlacement(compile=compile))
        return [
            (float(engine.accumulate(ExpertLoss(Flow()), [(batch, t_B)])), float(engine.step(1e-2))) for _ in range(3)
        ]

    tried = []

    def fails(*_: object) -> None:
        tried.append(1)
        raise RuntimeError("no code for this GPU")

    plain = curve(False)
    monkeypatch.setattr(engines, "compiles", lambda *_: True)  # as on a GPU
    with torch._dynamo.config.patch(suppress_errors=False), counted_graphs():
        torch.compiler.set_default_backend(fails)
        if asked:
            with pytest.raises(Exception, match="no code for this GPU"):
                curve(True)
            return
        near = curve(None)
    assert tried and near[0] == plain[0]
    assert near == [pytest.approx(each, rel=1e-2) for each in plain]
