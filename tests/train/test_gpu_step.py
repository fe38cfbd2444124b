"""A training step on a GPU that isn't there: the same numbers, and the host waits once, for the step before."""

import copy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from ddm_ray.data.loading.loader import Loader
from ddm_ray.run.graph import ROUTER, STUDENT, Artifact, expert
from ddm_ray.run.run import Run
from ddm_ray.train.adamw import AdamW
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.job import TrainJob, train_job
from ddm_ray.train.step_sync import Agreed, Flags, StepResult, StepSync
from ddm_ray.train.teachers import Teachers, load_teachers
from tests.pretend_gpu import PretendGPU
from tests.pretend_streams import pretended
from tests.random_run import make_data, make_run, make_texts

pytestmark = pytest.mark.contract

STEPS, MICRO_BATCH = 4, 6
SIZE = ("expert.train.batch=12", "router.train.batch=24", "expert.train.steps=4", "router.train.steps=4")

STUDENT_SIZE = ("student.train={steps: 4, batch: 24, learning_rate: 1.0e-3, warmup_steps: 0, ema_decay: 0.5}",)


def move(model: nn.Module, device: torch.device) -> None:
    """Put a network onto the device as `nn.Module.to` does, which torch refuses for meta."""
    for module in model.modules():
        for name, parameter in [*module._parameters.items()]:
            module._parameters[name] = None if parameter is None else nn.Parameter(parameter.detach().to(device))
        for name, buffer in [*module._buffers.items()]:
            module._buffers[name] = None if buffer is None else buffer.to(device)


def results_of(
    model: nn.Module,
    job: TrainJob,
    loader: Loader,
    device: torch.device,
    gpu: PretendGPU | None,
    teachers: Teachers | None = None,
) -> list[StepResult]:
    """What the job's steps come to: a loop as the worker's, without DeepSpeed. On `gpu` its waits are checked."""
    sync, known = StepSync(), list[StepResult]()
    move(model, device)
    optimizer = AdamW(model.parameters(), job.train.model_copy(update={"ema_decay": 0.9}), clip_norm=0.1)
    optimizer.param_groups[0]["lr"] = 1e-2
    for expert_network in teachers.experts if teachers else ():
        assert isinstance(expert_network, nn.Module)
        move(expert_network, device)
    with closing(RankBatches(job, loader, 0, 1, MICRO_BATCH, teachers)) as batches:
        for step in range(STEPS):
            before = gpu.waits.copy() if gpu else None
            total = torch.zeros((), dtype=torch.float64, device=device)
            for batch, weight_B in batches.at(step, device):
                loss = (job.objective(model, batch) * weight_B).sum()
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            known += sync.exchange(step, total, optimizer.norm, Flags()).results
            if gpu and before is not None:
                waits = gpu.waits - before
                assert waits.total() == (1 if step else 0), waits
        return [*known, *sync.finish(Agreed((), Flags())).results]


@pytest.mark.parametrize("artifact", [expert(1), ROUTER])
@pytest.mark.parametrize("settings", [(), ("expert.model.patch_size=2", "expert.train.mask_ratio=0.75")])
def test_the_host_waits_for_the_step_before_alone(
    tmp_path: Path, world_of_one: None, artifact: Artifact, settings: tuple[str, ...]
) -> None:
    run = make_data(str(tmp_path / "run"), settings=(*SIZE, *settings), num_rows=50)
    check(run, artifact)


def test_a_student_asks_the_experts_of_its_rows_without_a_wait(tmp_path: Path, world_of_one: None) -> None:
    run = make_run(str(tmp_path / "run"), settings=(*SIZE, *STUDENT_SIZE), num_rows=50)
    check(run, STUDENT, lambda: load_teachers(run, None, torch.device("cpu")))


def test_texts_come_like_labels(tmp_path: Path, world_of_one: None) -> None:
    check(make_texts(str(tmp_path / "run"), settings=SIZE), expert(0))


def check(run: Run, artifact: Artifact, teachers: Callable[[], Teachers | None] = lambda: None) -> None:
    job = train_job(run, artifact)
    with Loader(run, job.shards, job.train.seed, job.batch) as loader:
        model = job.build()
        plain = results_of(copy.deepcopy(model), job, loader, torch.device("cpu"), None, teachers())
        asked = teachers()
        with pretended() as gpu:
            ours = results_of(model, job, loader, torch.device("meta"), gpu, asked)
            assert not gpu.races
    for step, (one, other) in enumerate(zip(ours, plain, strict=True)):
        assert (one.step, one.loss, one.norm) == (step, pytest.approx(other.loss, rel=1e-6), pytest.approx(other.norm))
    assert len({outcome.loss for outcome in plain}) == STEPS


def test_a_trial_makes_no_more_than_it_takes(tmp_path: Path, world_of_one: None) -> None:
    """Else each size that is tried would pin a whole share of its own."""
    run = make_data(str(tmp_path / "run"), settings=SIZE, num_rows=50)
    job = train_job(run, expert(1))
    with Loader(run, job.shards, job.train.seed, job.batch) as loader, pretended():
        batches = RankBatches(job, loader, 0, 1, 1)
        assert len([*batches.at(1, torch.device("meta"), most=2)]) == 2
        assert not batches._ahead and job.batch > 2
