"""The optimizer's budgets, and its update that is made to be compiled, against torch's own."""

from collections.abc import Callable
from itertools import accumulate
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import metrics
from torch.profiler import ProfilerActivity, profile

from ddm_ray.config import TrainConfig
from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import num_parameters
from ddm_ray.placement import TrainPlacement
from ddm_ray.train.engine import Engine
from ddm_ray.train.optimizer import AdamWithEMA, update

SIZE = 1000
HOW = {"ema_decay": 0.9, "clip_norm": 2.0, "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def trained(compiled: bool, gradients: list[Tensor]) -> list[Tensor]:
    """Value, EMA and moments after a step by each gradient."""
    value = nn.Parameter(torch.linspace(-1, 1, SIZE, dtype=gradients[0].dtype))
    optimizer = AdamWithEMA([value], compiled=compiled, **HOW)
    for gradient in gradients:
        value.grad = gradient.clone()
        optimizer.step()
    return [value.detach(), *(optimizer.state[value][name] for name in ("ema", "exp_avg", "exp_avg_sq", "step"))]


@pytest.mark.parametrize("poisoned", [False, True])
def test_the_compiled_update_is_torchs_own(poisoned: bool) -> None:
    """Also where a gradient isn't finite, of which no step is taken, in between."""
    torch.compiler.reset()
    torch.compiler.set_default_backend("eager")
    gradients = [(1 + step) * torch.randn(SIZE, generator=torch.Generator().manual_seed(step)) for step in range(5)]
    if poisoned:
        gradients.insert(2, torch.full((SIZE,), torch.nan))
    try:
        for ours, torchs in zip(trained(True, gradients), trained(False, gradients), strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-7)
    finally:
        torch.compiler.set_default_backend(None)
        torch.compiler.reset()


def test_the_update_is_one_kernel() -> None:
    """What it reads and writes goes through once: 36 bytes a parameter."""
    torch.compiler.reset()
    shards = [torch.randn(SIZE).abs() for _ in range(5)]
    shards[0].requires_grad_()
    scalars = {name: torch.tensor(0.5) for name in ("kept", "size", "root")}
    expected = [shard.detach().clone() for shard in shards]
    update(*expected, torch.tensor(0.5), torch.tensor(True), **scalars, constants=(0.9, 0.95, 1e-8, 0.99))
    metrics.reset()
    with torch.no_grad():
        compiled = torch.compile(update, dynamic=False)
        compiled(*shards, torch.tensor(0.5), torch.tensor(True), **scalars, constants=(0.9, 0.95, 1e-8, 0.99))
    assert metrics.generated_kernel_count == 1
    for ours, plain in zip(shards, expected, strict=True):
        torch.testing.assert_close(ours.detach(), plain, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()


def engine_of(zero_stage: int, precision: str = "bf16") -> tuple[Engine, int]:
    """An engine around a DiT, and its number of parameters."""
    with torch.random.fork_rng():
        model = DiT(image_size=16, channels=4, num_classes=10, patch_size=2, width=128, depth=3, heads=4)
    train = TrainConfig.model_validate({"steps": 1, "global_batch": 4, "precision": precision})
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
