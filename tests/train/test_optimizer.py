"""The contract of OPTIMIZERS, AdamW's budgets, and its update that is made to be compiled, against torch's own."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import metrics
from torch.profiler import ProfilerActivity, profile

from ddm_ray.config import TrainConfig
from ddm_ray.config.optimizers import OPTIMIZERS
from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import TRAINING_BYTES, num_parameters
from ddm_ray.placement import TrainPlacement
from ddm_ray.train.adamw import AdamW
from ddm_ray.train.engine import Engine
from ddm_ray.train.optimizer import ShardOptimizer, update

pytestmark = pytest.mark.contract

SIZE = 1000
TRAIN = TrainConfig(steps=1, batch=4, ema_decay=0.9, betas=(0.9, 0.95), weight_decay=0.1)


def optimizer_of(name: str, value: nn.Parameter, rate: float = 1e-2, **how: Any) -> ShardOptimizer:
    optimizer: ShardOptimizer = resolve_name(OPTIMIZERS[name])([value], TRAIN, **{"clip_norm": 2.0} | how)
    optimizer.param_groups[0]["lr"] = rate
    return optimizer


def trained(name: str, compiled: bool, gradients: list[Tensor]) -> list[Tensor]:
    """Value, EMA and moments after a step by each gradient."""
    value = nn.Parameter(torch.linspace(-1, 1, SIZE, dtype=gradients[0].dtype))
    optimizer = optimizer_of(name, value, compiled=compiled)
    for gradient in gradients:
        value.grad = gradient.clone()
        optimizer.step()
    return [value.detach(), *(optimizer.state[value][each] for each in ("ema", *optimizer.moments, "step"))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_falls_to_the_minimum_of_a_parabola(name: str) -> None:
    """With nothing clipped, each element at the end within a step of where it should be."""
    right = torch.linspace(-1, 1, SIZE)
    value = nn.Parameter(torch.zeros(SIZE))
    optimizer = optimizer_of(name, value, clip_norm=0.0)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 400)
        value.grad = value.detach() - right
        optimizer.step()
    assert (value.detach() - right).abs().max() < 0.02
    assert (optimizer.state[value]["ema"] - value.detach()).abs().max() < 0.02


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_no_more_than_is_estimated(name: str) -> None:
    """By its declaration, from which its state is saved and resumed: fp32 tensors of the shard's shape."""
    value = nn.Parameter(torch.randn(3, 5))
    optimizer = optimizer_of(name, value)
    value.grad = torch.randn(3, 5)
    optimizer.step()
    state = optimizer.state[value]
    assert state.keys() == {"step", "ema", *optimizer.moments}
    kept = [value, *(tensor for record, tensor in state.items() if record != "step"), value.grad]
    assert all(tensor.shape == value.shape and tensor.dtype == torch.float32 for tensor in kept)
    assert sum(tensor.nbytes for tensor in kept) / value.numel() <= sum(TRAINING_BYTES.values())


def test_lion_is_the_papers() -> None:
    """Chen et al. 2023, algorithm 2, by hand."""
    gradients = [torch.randn(SIZE, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    value, mean = torch.linspace(-1, 1, SIZE), torch.zeros(SIZE)
    for gradient in gradients:
        clipped = gradient * min(1, 2.0 / float(gradient.norm()))
        value = value - 1e-2 * ((0.9 * mean + 0.1 * clipped).sign() + 0.1 * value)
        mean = 0.95 * mean + 0.05 * clipped
    torch.testing.assert_close(trained("lion", False, gradients)[0], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("poisoned", [False, True])
def test_the_compiled_update_is_the_uncompiled_one(name: str, poisoned: bool) -> None:
    """AdamW's is torch's own. Also where a gradient isn't finite, of which no step is taken, in between."""
    torch.compiler.reset()
    torch.compiler.set_default_backend("eager")
    gradients = [(1 + step) * torch.randn(SIZE, generator=torch.Generator().manual_seed(step)) for step in range(5)]
    if poisoned:
        gradients.insert(2, torch.full((SIZE,), torch.nan))
    try:
        for ours, torchs in zip(trained(name, True, gradients), trained(name, False, gradients), strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-7)
    finally:
        torch.compiler.set_default_backend(None)
        torch.compiler.reset()


@pytest.mark.chaos
def test_the_update_is_one_kernel() -> None:
    """What it reads and writes goes through once: 36 bytes a parameter."""
    torch.compiler.reset()
    shards = [torch.randn(SIZE).abs() for _ in range(5)]
    shards[0].requires_grad_()
    scalars = (torch.tensor(0.5), torch.tensor(0.5), torch.tensor(0.5))
    expected = [shard.detach().clone() for shard in shards]

    def updated(function: Callable[..., None], value: Tensor, gradient: Tensor, *others: Tensor) -> None:
        mean, square, ema = others
        weight = torch.tensor(0.01)
        function(value, gradient, (mean, square), ema, torch.tensor(0.5), torch.tensor(True), weight, scalars)

    step_and_ema = partial(update, AdamW.updated, (0.9, 0.95))
    updated(step_and_ema, *expected)
    metrics.reset()
    with torch.no_grad():
        updated(torch.compile(step_and_ema, dynamic=False), *shards)
    assert metrics.generated_kernel_count == 1
    for ours, plain in zip(shards, expected, strict=True):
        torch.testing.assert_close(ours.detach(), plain, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()


def engine_of(zero_stage: int, precision: str = "bf16") -> tuple[Engine, int]:
    """An engine around a DiT, and its number of parameters."""
    with torch.random.fork_rng():
        model = DiT(image_size=16, channels=4, num_classes=10, patch_size=2, width=128, depth=3, heads=4)
    train = TrainConfig.model_validate({"steps": 1, "batch": 4, "precision": precision})
    placement = TrainPlacement.model_validate({"zero_stage": zero_stage})
    return Engine(model, train, placement), num_parameters(model)


def backward(engine: Engine) -> None:
    x, t_B, label_B = torch.randn(4, 4, 16, 16), torch.rand(4), torch.arange(4)
    engine.backward((engine.model(x, t_B, label_B) - x).float().square().mean())


@pytest.mark.parametrize(("zero_stage", "precision", "within"), [(1, "bf16", 6), (1, "fp32", 4), (2, "bf16", 6)])
def test_memory_that_a_step_takes_for_a_while(
    world_of_one: None, zero_stage: int, precision: str, within: float
) -> None:
    """A flat gradient, and where that isn't in fp32 another: what `ddm plan` says must fit."""
    engine, size = engine_of(zero_stage, precision)
    backward(engine)
    engine.step(1e-4)
    backward(engine)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine.step(1e-4)
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    taken = list(accumulate(nbytes for _, nbytes in events))
    assert within - 0.1 < max(taken) / size <= within + 0.1
    engine.close()


@pytest.mark.parametrize(
    ("zero_stage", "compiled", "most"),
    [
        # Flattened 4, in fp32 6, its norm 4, clipped 8, AdamW 28 (counted as 32), EMA 12, in bf16 again 6.
        (1, False, 73),
        (2, False, 75),
        # In place of clipping, AdamW and the EMA one kernel: 36.
        (1, True, 21 + 36),
    ],
)
def test_bytes_that_a_step_of_the_optimizer_moves(
    world_of_one: None,
    benchmark: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    zero_stage: int,
    compiled: bool,
    most: float,
) -> None:
    counts = benchmark("gpu_counts")
    engine, size = engine_of(zero_stage)
    if compiled:
        monkeypatch.setattr(engine._optimizer, "_compiled_update", lambda *tensors, **rest: None)
    backward(engine)
    engine.step(1e-4)
    with counts.Counted() as before:
        backward(engine)
    with counts.Counted() as counted:
        engine.step(1e-4)
    assert counted.total.bytes / size + (36 if compiled else 0) <= most
    assert before.waits == counted.waits == 0, "the host may know a loss and a norm a step later"
    engine.close()
