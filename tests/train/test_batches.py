"""What a job says of its times and its dropout reaches the batches that are trained on."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm_ray.core.augmentation import Views
from ddm_ray.core.condition import Text, join
from ddm_ray.core.flow import PATHS, interpolate
from ddm_ray.core.streams import BATCH, stream
from ddm_ray.data.loading.loader import Loader
from ddm_ray.run.graph import MONOLITH, ROUTER, Artifact, expert
from ddm_ray.run.run import Run
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.job import TrainJob, train_job
from ddm_ray.train.objectives import Batch, ExpertLoss, draw_batch
from tests.random_run import make_data, make_texts

STEP = 5
SIZE = ("expert.train.batch=128", "router.train.batch=256", "expert.model.analytic_skip=")
MASKED = ("expert.model.patch_size=2", "expert.train.mask_ratio=0.75")


def job_of(
    path: Path, flow: str, artifact: Artifact = MONOLITH, settings: tuple[str, ...] = ()
) -> tuple[Run, TrainJob]:
    """A run of 50 rows, and one of its jobs."""
    run = make_data(str(path), settings=(*SIZE, f"flow={flow}", *settings), num_rows=50)
    return run, train_job(run, artifact)


def batch_of(
    run: Run, job: TrainJob, rank: int = 0, world: int = 1, micro: int | None = None
) -> list[tuple[Batch, Tensor]]:
    """The micro-batches of one step."""
    share = math.ceil(job.batch / world)
    with Loader(run, job.shards, job.train.seed, job.batch) as loader:
        return list(RankBatches(job, loader, rank, world, micro or share).at(STEP, torch.device("cpu")))


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
def test_times_are_the_flows(tmp_path: Path, artifact: Artifact, flow: str, quantile) -> None:
    run, job = job_of(tmp_path / "run", flow, artifact)
    ((batch, weight_B),) = batch_of(run, job)
    assert len(batch.t_B) == job.batch
    torch.testing.assert_close(batch.t_B.double(), quantile(uniforms(job)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight_B.sum(), torch.tensor(1.0))


def test_the_loss_is_taken_on_the_flows_path(tmp_path: Path) -> None:
    """The objective of the job shows its network points of the path that the times were drawn on."""
    run, job = job_of(tmp_path / "run", "{path: cosine, prediction: noise, times: logit-normal}")
    ((batch, _),) = batch_of(run, job)
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
    run, job = job_of(tmp_path / "run", "{}", settings=(f"expert.train.condition_dropout={dropout}",))
    ((batch, _),) = batch_of(run, job)
    share = float((batch.condition == job.null_label).double().mean())
    assert abs(share - dropout) <= (0.1 if 0 < dropout < 1 else 0)
    assert set(batch.condition.tolist()) <= {*range(10), job.null_label}


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_and_micro_batches_are_slices_of_one_batch(tmp_path: Path, texts: bool, world: int) -> None:
    sizes = ("expert.train.steps=8", "expert.train.batch=5", "expert.model.patch_size=2")
    settings = (*sizes, "expert.train.mask_ratio=0.5")
    if texts:
        run = make_texts(str(tmp_path / "run"), settings)
        job = train_job(run, MONOLITH)
    else:
        run, job = job_of(tmp_path / "run", "{times: logit-normal}", settings=settings)
    ((full_batch, _),) = batch_of(run, job)
    parts = [part for rank in range(world) for part in batch_of(run, job, rank, world, micro=2)]
    kept_B = torch.cat([weight_B for _, weight_B in parts]) > 0
    conditions = join([batch.condition for batch, _ in parts])[kept_B]
    if isinstance(full_batch.condition, Text):
        assert isinstance(conditions, Text)
        for name in ("tokens_BLE", "mask_BL", "pooled_BP"):
            assert torch.equal(getattr(conditions, name), getattr(full_batch.condition, name)), name
    else:
        assert torch.equal(conditions, full_batch.condition)
    assert full_batch.kept_BM is not None and full_batch.kept_BM.shape == (10, 2 if texts else 8)
    for name in ("data_BCHW", "noise_BCHW", "t_B", "cluster_B", "kept_BM"):
        assert torch.equal(
            torch.cat([getattr(batch, name) for batch, _ in parts])[kept_B], getattr(full_batch, name)
        ), name
    assert float(torch.cat([weight_B for _, weight_B in parts]).sum()) == pytest.approx(world)


def test_a_mask_changes_nothing_else_and_ends_before_the_last_steps(tmp_path: Path) -> None:
    masked = (*MASKED, "expert.train.steps=8")
    batches = {}
    for name, settings in {
        "whole": MASKED[:1],
        "masked": masked,
        "last": (*masked, f"expert.train.unmasked_steps={8 - STEP}"),
        "not yet last": (*masked, f"expert.train.unmasked_steps={7 - STEP}"),
    }.items():
        ((batches[name], _),) = batch_of(*job_of(tmp_path / name, "{}", settings=settings))
    for field in ("data_BCHW", "noise_BCHW", "t_B", "condition", "cluster_B"):
        assert all(torch.equal(getattr(batch, field), getattr(batches["whole"], field)) for batch in batches.values())
    assert batches["whole"].kept_BM is None and batches["last"].kept_BM is None
    kept_BM = batches["masked"].kept_BM
    assert kept_BM is not None and kept_BM.shape == (256, 4)
    assert torch.equal(batches["not yet last"].kept_BM, kept_BM)


def test_a_job_trains_on_kept_tokens_alone(tmp_path: Path) -> None:
    """The objective, the network and the batch of one job agree on which patches count."""
    run, job = job_of(tmp_path / "run", "{}", settings=MASKED)
    ((batch, _),) = batch_of(run, job)
    assert batch.kept_BM is not None
    kept_BN = torch.zeros(256, 16).scatter(1, batch.kept_BM, 1.0).bool()
    pixels_BHW = kept_BN.view(256, 4, 4).repeat_interleave(2, 1).repeat_interleave(2, 2)
    model = job.build()
    loss_B = job.objective(model, batch)
    # A new network says 0 everywhere, so its loss is the mean square of the kept pixels' velocity.
    square_BHW = (batch.noise_BCHW - batch.data_BCHW).square()[:, 0]
    torch.testing.assert_close(loss_B, (square_BHW * pixels_BHW).sum((1, 2)) / 16)


def test_dropped_texts_are_the_empty_prompts(tmp_path: Path) -> None:
    run = make_texts(str(tmp_path / "run"), ("expert.train.batch=32",))
    job = train_job(run, MONOLITH)
    ((batch, _),) = batch_of(run, job)
    fields = (job.train.seed, job.key, STEP, job.batch, job.image_shape, job.train.condition_dropout)
    drop_B = draw_batch(*fields, job.times, job.flow.path).drop_B
    assert 0 < drop_B.sum() < 64
    with Loader(run, job.shards, job.train.seed, job.batch) as loader:
        _, kept, _ = loader.batch(STEP, torch.arange(64))
        null = loader.null_text
    assert isinstance(batch.condition, Text) and isinstance(kept, Text) and null is not None
    for name in ("tokens_BLE", "mask_BL", "pooled_BP"):
        found_B, kept_B, null_1 = (getattr(text, name) for text in (batch.condition, kept, null))
        assert torch.equal(found_B[~drop_B], kept_B[~drop_B])
        assert (found_B[drop_B] == null_1).all()
    assert null.mask_BL.tolist() == [[True, False, False, False, False]]
    assert null.tokens_BLE[0, 0].tolist() == [0.5] * 6 and not null.tokens_BLE[0, 1:].any()


@pytest.mark.parametrize("artifact", [expert(1), ROUTER, MONOLITH])
@pytest.mark.parametrize("setting", ["horizontal_flips=true", "crop_margin=3"])
def test_views_are_drawn_for_a_step_and_leave_all_else_as_it_was(
    tmp_path: Path, artifact: Artifact, setting: str
) -> None:
    """Whatever the world and the micro-batch; a restart at the step draws the same."""
    settings = ("expert.train.batch=5", "router.train.batch=10")
    plain_run, plain_job = job_of(tmp_path / "plain", "{}", artifact, settings)
    run, job = job_of(tmp_path / "run", "{}", artifact, (*settings, f"data.{setting}"))
    ((plain, _),) = batch_of(plain_run, plain_job)
    ((batch, _),) = batch_of(run, job)
    views = job.augmentation.draw(job.train.seed, job.key, STEP, job.batch)
    assert views is not None and torch.equal(batch.data_BCHW, viewed(run, job, views))
    for name in ("noise_BCHW", "t_B", "condition", "cluster_B"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), name
    assert not torch.equal(batch.data_BCHW, plain.data_BCHW)
    parts = [part for rank in range(3) for part in batch_of(run, job, rank, 3, micro=2)]
    kept_B = torch.cat([weight_B for _, weight_B in parts]) > 0
    assert torch.equal(torch.cat([part.data_BCHW for part, _ in parts])[kept_B], batch.data_BCHW)


def viewed(run: Run, job: TrainJob, views: Views) -> Tensor:
    """The step's rows in these views, one row at a time."""
    with Loader(run, job.shards, job.train.seed, job.batch) as loader:
        every = [torch.tensor([place]) for place in range(job.batch)]
        return torch.cat([loader.batch(STEP, place, views[place]).data_BCHW for place in every])
