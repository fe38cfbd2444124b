"""The engine against torch's own optimizer and the EMA's closed form."""

import copy
import gc
import math
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from ddm_ray.config import TrainConfig
from ddm_ray.config.optimizers import OPTIMIZERS
from ddm_ray.core.flow import Flow
from ddm_ray.errors import ConfigError
from ddm_ray.models.compiled import compile_blocks
from ddm_ray.models.network import checkpoint_activations
from ddm_ray.placement import TrainPlacement
from ddm_ray.train.adamw import AdamW
from ddm_ray.train.engine import Engine
from ddm_ray.train.objectives import Batch, ExpertLoss
from tests.counted_graphs import counted_graphs
from tests.models.test_activations import loss_and_gradients
from tests.models.test_text_condition import CLASSES, condition, inputs, perturbed

pytestmark = pytest.mark.contract

TRAIN = TrainConfig(
    steps=8,
    batch=8,
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
    return (model(x.to(next(model.parameters()).dtype)) - x.sin()).square().mean()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_engine_trains_as_plain_torch_does(world_of_one: None, zero_stage: int) -> None:
    ours, plain = _model(), _model()
    engine = Engine(ours, TRAIN, TrainPlacement(zero_stage=zero_stage))
    adam = torch.optim.AdamW(plain.parameters(), betas=TRAIN.betas, weight_decay=TRAIN.weight_decay)
    average = copy.deepcopy(plain)
    for step in range(TRAIN.steps):
        rate = TRAIN.learning_rate * min(1, (step + 1) / 3)
        engine.backward(_loss(engine.model, step))
        norm = engine.step(rate)
        adam.zero_grad()
        _loss(plain, step).backward()
        plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), TRAIN.clip_norm)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        assert float(norm) == pytest.approx(float(plain_norm), rel=1e-5)
        with torch.no_grad():
            for mean, value in zip(average.parameters(), plain.parameters(), strict=True):
                mean.lerp_(value, max(1 - TRAIN.ema_decay, 9 / (10 + step + 1)))
    values, means = dict(plain.named_parameters()), dict(average.named_parameters())
    held = engine.shards.held()
    assert [fragment.name for fragment in held] == list(values)
    for fragment in held:
        for record, right in (("value", values[fragment.name]), ("ema", means[fragment.name])):
            tensor = fragment.records[record].view_as(right)
            torch.testing.assert_close(tensor, right.detach(), rtol=1e-5, atol=1e-6)
        for moment in ("exp_avg", "exp_avg_sq"):
            right = adam.state[values[fragment.name]][moment]
            torch.testing.assert_close(fragment.records[moment].view_as(right), right, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_accumulation_is_one_larger_batch(world_of_one: None, zero_stage: int) -> None:
    """Any number of micro-batches a step, which may change from step to step."""
    one = Engine(_model(), TRAIN, TrainPlacement(zero_stage=zero_stage))
    many = Engine(_model(), TRAIN, TrainPlacement(zero_stage=zero_stage))
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
    for step in range(4):
        one.backward((one.model(x) - x).square().sum() / 8)
        for part in x.chunk(1 + step):
            many.backward((many.model(part) - part).square().sum() / 8)
        assert float(one.step(1e-2)) == pytest.approx(float(many.step(1e-2)), rel=1e-5)
    for a, b in zip(one.shards.held(), many.shards.held(), strict=True):
        torch.testing.assert_close(a.records["value"], b.records["value"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_put_into_the_shards_is_what_the_model_computes_with(
    world_of_one: None, optimizer: str, zero_stage: int, precision: str
) -> None:
    """And all that its optimizer knows: it goes on to the bit."""
    train = TRAIN.model_copy(update={"precision": precision, "optimizer": optimizer})
    engine, other = (Engine(_model(), train, TrainPlacement(zero_stage=zero_stage)) for _ in range(2))
    for step in range(2):
        engine.backward(_loss(engine.model, step).float())
        engine.step(1e-2)
    for mine, theirs in zip(other.shards.held(), engine.shards.held(), strict=True):
        for record, values in theirs.records.items():
            mine.records[record].copy_(values)
    assert other.shards.computing_otherwise() == [fragment.name for fragment in other.shards.held()]
    other.shards.refresh()
    other.set_adam_step(2)
    assert other.shards.computing_otherwise() == []
    for step in range(2, 5):
        losses = []
        for one in (engine, other):
            loss = _loss(one.model, step).float()
            one.backward(loss)
            losses.append((float(loss), one.step(1e-2)))
        assert losses[0] == losses[1]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bf16_trains_alike_where_autocast_answers_as_on_a_gpu(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch, zero_stage: int, checkpointed: bool
) -> None:
    """Networks compute in their weights' precision by themselves; DeepSpeed has a view of autocast, too."""
    train = TRAIN.model_copy(update={"precision": "bf16"})
    (noise_BCHW, t_B), label_B = inputs(), condition(CLASSES)
    batch = Batch(noise_BCHW.flip(0).sin(), noise_BCHW, t_B, label_B, torch.zeros_like(label_B))

    def objective(model: nn.Module, batch: Batch) -> torch.Tensor:
        assert model(batch.noise_BCHW, batch.t_B, batch.condition).dtype == torch.bfloat16
        loss_B = ExpertLoss(Flow())(model, batch)
        assert loss_B.dtype == torch.float32
        return loss_B

    def curve() -> list[tuple[float, float]]:
        placement = TrainPlacement(zero_stage=zero_stage, activation_checkpointing=checkpointed)
        engine = Engine(perturbed(**CLASSES), train, placement)
        return [(float(engine.accumulate(objective, [(batch, t_B)])), engine.step(1e-2)) for _ in range(3)]

    on_a_cpu = curve()
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: is_enabled(*(device or ("cpu",))))
    assert curve() == on_a_cpu


def test_a_model_that_computes_in_bf16_is_one_graph() -> None:
    model, rows = perturbed(**CLASSES), (*inputs(), condition(CLASSES))
    in_fp32, _ = loss_and_gradients(model, rows)
    model.bfloat16()
    loss, gradients = loss_and_gradients(model, rows)
    assert 0 < abs(float(loss - in_fp32)) < 2e-2 * float(in_fp32)
    checkpoint_activations(model)
    with counted_graphs("aot_eager") as graphs:
        compile_blocks(model)
        compiled_loss, compiled_gradients = loss_and_gradients(model, rows)
        assert graphs.num == 1 and not graphs.breaks
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_gradients, gradients)


@pytest.mark.parametrize(("zero_stage", "precision", "checkpointed"), [(1, "fp32", False), (2, "bf16", True)])
def test_compiled_blocks_train_to_the_bit_as_they_do_otherwise(
    world_of_one: None, zero_stage: int, precision: str, checkpointed: bool
) -> None:
    """And with the compiled update, which rounds otherwise, nearly: one graph for all blocks, one for the update."""
    train = TRAIN.model_copy(update={"precision": precision})
    (noise_BCHW, t_B), label_B = inputs(), condition(CLASSES)
    batch = Batch(noise_BCHW.flip(0).sin(), noise_BCHW, t_B, label_B, torch.zeros_like(label_B))

    def curve(compiled: bool, update: bool = False) -> list[tuple[float, float]]:
        how = {"zero_stage": zero_stage, "activation_checkpointing": checkpointed, "compile": compiled}
        engine = Engine(perturbed(**CLASSES), train, TrainPlacement(**how))
        if not update:
            engine._optimizer._compiled_update = None
        return [
            (float(engine.accumulate(ExpertLoss(Flow()), [(batch, t_B)])), float(engine.step(1e-2))) for _ in range(6)
        ]

    plain = curve(False)
    with counted_graphs("aot_eager") as graphs:
        assert curve(True) == plain
        assert graphs.num == 1 and not graphs.breaks
    with counted_graphs("aot_eager") as graphs:
        near = curve(True, update=True)
        assert graphs.num == 2 and not graphs.breaks
    assert near[0] == plain[0]
    assert near == [pytest.approx(each, rel=1e-4 if precision == "fp32" else 1e-2) for each in plain]


@pytest.mark.parametrize("missing", ["gcc", "g++"])
def test_without_a_compiler_an_engine_says_so_at_once(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    for name in {"gcc", "g++"} - {missing}:
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    for name, value in {"PATH": str(tmp_path), "CC": "", "CXX": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"compile: there is no {re.escape(missing)} or clang.* here; install g"):
        Engine(_model(), TRAIN, TrainPlacement(compile=True))
    (tmp_path / missing).symlink_to(tmp_path / next(iter({"gcc", "g++"} - {missing})))
    Engine(_model(), TRAIN, TrainPlacement(compile=True)).close()


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_deepspeed_waits_for_no_device_to_measure_its_own_speed(world_of_one: None, zero_stage: int) -> None:
    engine = Engine(_model(), TRAIN, TrainPlacement(zero_stage=zero_stage))
    assert not engine.model.tput_timer.config.enabled


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_has_an_infinite_norm(
    world_of_one: None, zero_stage: int, precision: str, poison: float
) -> None:
    train = TRAIN.model_copy(update={"precision": precision})
    if zero_stage == 0 and precision == "bf16":
        with pytest.raises(ConfigError, match="zero_stage 0 is for precision fp32"):
            Engine(_model(), train, TrainPlacement(zero_stage=0))
        return
    engine = Engine(_model(), train, TrainPlacement(zero_stage=zero_stage))
    engine.backward(_loss(engine.model, 0).float())
    assert 0 < engine.step(1e-2) < 1e3
    sound = [{name: values.clone() for name, values in one.records.items()} for one in engine.shards.held()]
    engine.backward((_loss(engine.model, 1) * poison).float())
    assert engine.step(1e-2) == math.inf
    for fragment, before in zip(engine.shards.held(), sound, strict=True):
        assert all(torch.equal(values, before[name]) for name, values in fragment.records.items()), "no step is taken"


@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_a_closed_engine_leaves_nothing(world_of_one: None, zero_stage: int, precision: str) -> None:
    """Two at once may be more than memory holds."""
    engine = Engine(_model(), TRAIN.model_copy(update={"precision": precision}), TrainPlacement(zero_stage=zero_stage))
    engine.backward(_loss(engine.model, 0).float())
    engine.step(1e-3)
    held = [weakref.ref(each) for each in (*engine.model.parameters(), *engine.shards.partitions)]
    engine.close()
    del engine
    gc.collect()
    assert not any(each() for each in held)


@pytest.mark.parametrize("decay_used", [0.5, 0.5**0.5])
def test_ema_closed_form(decay_used: float) -> None:
    """While the average is short, up to step 8, and after it; a decay that is off (the second case) must miss it."""
    value = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    adam = AdamW(iter([value]), TRAIN.model_copy(update={"ema_decay": decay_used, "weight_decay": 0.0}))
    adam.param_groups[0]["lr"] = 0.3
    seen = [value.detach().clone()]
    for step in range(12):
        value.grad = torch.tensor([1.0, float(step) - 2.0], dtype=torch.float64)
        adam.step()
        seen.append(value.detach().clone())
    # m_n = x_0 prod_j (1 - w_j) + sum_i w_i x_i prod_(j > i) (1 - w_j), where 9/18 is the first w that isn't larger
    weights = [1.0, *(9 / (10 + i) for i in range(1, 9)), *[0.5] * 4]
    left = [math.prod(1 - weight for weight in weights[i + 1 :]) for i in range(13)]
    closed = sum(weights[i] * left[i] * seen[i] for i in range(13))
    error = float((adam.state[value]["ema"] - closed).abs().max())
    assert (error < 1e-14) == (decay_used == 0.5)


def test_the_norm_is_exact_over_millions_of_elements() -> None:
    """One sum in fp32 would be off by 1e-3. What is over the bound is scaled down to it, what isn't stays."""
    numbers = torch.Generator().manual_seed(0)
    gradients = [torch.randn(2, 10**7, generator=numbers), torch.randn(5, generator=numbers)]
    right = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    for bound, factor in ((2 * right, 1), (right / 4, 1 / 4)):
        values = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for value, gradient in zip(values, gradients, strict=True):
            value.grad = gradient.clone()
        optimizer = AdamW(values, TRAIN, clip_norm=bound)
        optimizer.step()
        assert float(optimizer.norm) == pytest.approx(right, rel=1e-6)
        for value, gradient in zip(values, gradients, strict=True):
            torch.testing.assert_close(value.grad, gradient * factor, rtol=1e-5 * (factor < 1), atol=0)


NO_COMPILER = """
import sys, tempfile, torch
from ddm_ray.config.optimizers import OPTIMIZERS
from ddm_ray.config import TrainConfig
from ddm_ray.placement import TrainPlacement
from ddm_ray.train.adamw import AdamW
from ddm_ray.train.engine import Engine
torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
Engine(torch.nn.Linear(2, 2), TrainConfig(steps=1, batch=1), TrainPlacement())
print(sorted({"torch._inductor.lowering", "deepspeed.runtime.zero.muon.original_muon"} & sys.modules.keys()))
"""


def test_no_compiler_is_loaded_for_an_optimizer_that_is_not_ours() -> None:
    """It would take seconds of every start."""
    done = subprocess.run([sys.executable, "-c", NO_COMPILER], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "['deepspeed.runtime.zero.muon.original_muon']"


LAUNCHED = """
import torch
from ddm_ray.config import TrainConfig
from ddm_ray.placement import TrainPlacement
from ddm_ray.train import local
from ddm_ray.train.engine import Engine
with local.world():
    engine = Engine(torch.nn.Linear(2, 2), TrainConfig(steps=1, batch=1), TrainPlacement())
    engine.backward(engine.model(torch.ones(1, 2)).sum())
    engine.step(0.1)
print("trained")
"""


def test_what_another_launcher_left_is_not_taken_for_this_world() -> None:
    """As where `ddm train` is called below mpirun or torchrun, or Ray was started there."""
    left = {
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "8",
        "PMI_RANK": "3",
    }
    left |= {"MV2_COMM_WORLD_LOCAL_RANK": "3", "CROSS_RANK": "3", "CROSS_SIZE": "8", "LOCAL_SIZE": "4"}
    left |= {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    environment = {**os.environ, **left}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHED], capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.stdout.splitlines()[-1:] == ["trained"], done.stderr[-2000:]
