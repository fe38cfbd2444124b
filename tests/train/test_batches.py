"""What a job says of its times and its dropout reaches the batches that are trained on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm_ray.config import load_recipe
from ddm_ray.core.flow import PATHS, interpolate
from ddm_ray.core.streams import BATCH, stream
from ddm_ray.data.loader import Rows
from ddm_ray.storage.run import MONOLITH, ROUTER, Run, expert
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.job import TrainJob, train_job
from ddm_ray.train.objectives import Batch, ExpertLoss

STEP = 5
SIZE = ("expert.train.global_batch=256", "router.train.global_batch=256", "expert.model.analytic_skip=")


def job_of(path: Path, flow: str, artifact: str = MONOLITH, settings: tuple[str, ...] = ()) -> TrainJob:
    return train_job(Run.create(str(path), load_recipe("tiny", (*SIZE, f"flow={flow}", *settings))), artifact)


def batch_of(job: TrainJob, rank: int = 0, world: int = 1, micro: int | None = None) -> list[tuple[Batch, Tensor]]:
    """The micro-batches of one step, of 50 rows whose labels are their numbers by tens."""
    numbers = torch.arange(50)
    rows = Rows([str(n) for n in range(50)], torch.randn(50, *job.image_shape), numbers // 10, numbers % 2)
    return list(RankBatches(job, rows, rank, world, micro).at(STEP, torch.device("cpu")))


def uniforms(job: TrainJob) -> Tensor:
    """The quantiles of the step's times: what its stream gives after the noise."""
    numbers = stream(job.train.seed, BATCH, *job.key, STEP)
    numbers.standard_normal((job.batch, *job.image_shape), np.float32)
    return torch.from_numpy(numbers.random(job.batch, np.float32)).double()


@pytest.mark.parametrize("artifact", [expert(1), ROUTER, MONOLITH])
@pytest.mark.parametrize(
    ("flow", "quantile"),
    [
        ("{}", lambda u: u),
        ("{times: logit-normal, mean: 0.5, std: 2}", lambda u: torch.sigmoid(0.5 + 2 * torch.special.ndtri(u))),
        ("{times: discrete, num_times: 8}", lambda u: ((8 * u).floor() + 1) / 8),
        ("{shift: 3}", lambda u: 3 * u / (1 + 2 * u)),
        ("{path: cosine, prediction: noise, shift: 3}", lambda u: (3 * (u * torch.pi / 2).tan()).atan() * 2 / torch.pi),
    ],
)
def test_times_are_the_flows(tmp_path: Path, artifact: str, flow: str, quantile) -> None:
    job = job_of(tmp_path / "run", flow, artifact)
    ((batch, weight_B),) = batch_of(job)
    assert len(batch.t_B) == job.batch
    torch.testing.assert_close(batch.t_B.double(), quantile(uniforms(job)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight_B.sum(), torch.tensor(1.0))


def test_the_loss_is_taken_on_the_flows_path(tmp_path: Path) -> None:
    """The objective of the job shows its network points of the path that the times were drawn on."""
    job = job_of(tmp_path / "run", "{path: cosine, prediction: noise, times: logit-normal}")
    ((batch, _),) = batch_of(job)
    seen: list[Tensor] = []

    def network(x_BCHW: Tensor, t_B: Tensor, condition: Tensor) -> Tensor:
        seen.extend((x_BCHW, t_B))
        return batch.noise_BCHW

    assert isinstance(job.objective, ExpertLoss)
    assert job.objective(network, batch).abs().max() == 0  # type: ignore[arg-type]
    assert torch.equal(seen[0], interpolate(batch.data_BCHW, batch.noise_BCHW, batch.t_B, "cosine"))
    size_B = PATHS["cosine"].alpha(seen[1]) ** 2 + PATHS["cosine"].sigma(seen[1]) ** 2
    torch.testing.assert_close(size_B, torch.ones_like(size_B))


@pytest.mark.parametrize("dropout", [0, 0.25, 1])
def test_conditions_are_dropped_as_often_as_the_jobs_training_says(tmp_path: Path, dropout: float) -> None:
    job = job_of(tmp_path / "run", "{}", settings=(f"expert.train.condition_dropout={dropout}",))
    ((batch, _),) = batch_of(job)
    share = float((batch.condition == job.null_label).double().mean())
    assert abs(share - dropout) <= (0.1 if 0 < dropout < 1 else 0)
    assert set(batch.condition.tolist()) <= {*range(5), job.null_label}


def test_ranks_and_micro_batches_are_slices_of_one_batch(tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", "{times: logit-normal}", settings=("expert.train.global_batch=10",))
    ((whole, _),) = batch_of(job)
    parts = [part for rank in range(3) for part in batch_of(job, rank, 3, micro=2)]
    kept_B = torch.cat([weight_B for _, weight_B in parts]) > 0
    assert torch.equal(torch.cat([batch.t_B for batch, _ in parts])[kept_B], whole.t_B)
    assert torch.equal(torch.cat([batch.noise_BCHW for batch, _ in parts])[kept_B], whole.noise_BCHW)
    assert float(torch.cat([weight_B for _, weight_B in parts]).sum()) == pytest.approx(3)
