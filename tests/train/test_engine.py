"""The engine against torch's own optimizer and the EMA's closed form."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
from torch import nn

from ddm_ray.config import TrainConfig
from ddm_ray.placement import Placement
from ddm_ray.train.engine import AdamWithEMA, Engine

TRAIN = TrainConfig(
    steps=8,
    global_batch=8,
    learning_rate=1e-2,
    warmup_steps=3,
    ema_decay=0.8,
    weight_decay=0.1,
    clip_norm=0.5,
)


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 17), nn.GELU(), nn.Linear(17, 6))


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=generator)
    return (model(x) - x.sin()).square().mean()


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_engine_trains_as_plain_torch_does(world_of_one: None, zero_stage: int) -> None:
    ours, plain = _model(), _model()
    engine = Engine(ours, TRAIN, Placement(zero_stage=zero_stage), accumulation=1)
    adam = torch.optim.AdamW(plain.parameters(), betas=TRAIN.betas, weight_decay=TRAIN.weight_decay)
    average = copy.deepcopy(plain)
    for step in range(TRAIN.steps):
        engine.backward(_loss(engine.model, step))
        norm = engine.step(step)
        adam.zero_grad()
        _loss(plain, step).backward()
        plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), TRAIN.clip_norm)
        adam.param_groups[0]["lr"] = TRAIN.learning_rate * min(1, (step + 1) / 3)
        adam.step()
        assert norm == pytest.approx(float(plain_norm), rel=1e-5)
        with torch.no_grad():
            for mean, value in zip(average.parameters(), plain.parameters(), strict=True):
                mean.mul_(TRAIN.ema_decay).add_(value, alpha=1 - TRAIN.ema_decay)
    for parameter, value, mean in zip(engine.model.parameters(), plain.parameters(), average.parameters(), strict=True):
        torch.testing.assert_close(engine.full(parameter, "value"), value.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(engine.full(parameter, "ema"), mean.detach(), rtol=1e-5, atol=1e-6)


def test_accumulation_is_one_larger_batch(world_of_one: None) -> None:
    whole, parts = _model(), _model()
    one = Engine(whole, TRAIN, Placement(), accumulation=1)
    two = Engine(parts, TRAIN, Placement(), accumulation=2)
    x = torch.randn(8, 6)
    for step in range(3):
        one.backward((one.model(x) - x).square().sum() / 8)
        for half in x.chunk(2):
            two.backward((two.model(half) - half).square().sum() / 8)
        assert one.step(step) == pytest.approx(two.step(step), rel=1e-5)
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay_used", [0.9, 0.9**0.5])
def test_ema_closed_form(decay_used: float) -> None:
    """SCIENCE, oracle G; a decay that is off (the second case) must miss it."""
    value = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    adam = AdamWithEMA(iter([value]), ema_decay=decay_used, lr=0.3, betas=(0.9, 0.999), weight_decay=0.0)
    seen = [value.detach().clone()]
    for step in range(6):
        value.grad = torch.tensor([1.0, float(step) - 2.0], dtype=torch.float64)
        adam.step()
        seen.append(value.detach().clone())
    # m_n = d^n x_0 + (1 - d) sum_i d^(n - i) x_i
    closed = 0.9**6 * seen[0] + 0.1 * sum(0.9 ** (6 - i) * seen[i] for i in range(1, 7))
    error = float((adam.state[value]["ema"] - closed).abs().max())
    assert (error < 1e-14) == (decay_used == 0.9)


def test_the_private_switch_is_still_there() -> None:
    """Without this key DeepSpeed would compile a communicator for a minute in every worker."""
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    assert ShareMemCommBuilder.NAME == "deepspeed_shm_comm"
