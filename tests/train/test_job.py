"""What of a run's configuration reaches its training jobs, and which artifacts the flow identifies."""

from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.core.flow import Flow
from ddm_ray.core.times import TimeSampling
from ddm_ray.errors import TrainingError
from ddm_ray.models import weights
from ddm_ray.models.flops import training_flops_per_row
from ddm_ray.models.spec import denoiser_spec, router_spec
from ddm_ray.run.graph import MONOLITH, PARTITION, ROUTER, ROWS, Artifact, evaluation, expert, shard
from ddm_ray.run.run import Run
from ddm_ray.train.job import train_job
from ddm_ray.train.objectives import ExpertLoss, Masking, RouterLoss

pytestmark = pytest.mark.contract

FLOW = ("flow={path: cosine, prediction: noise, times: logit-normal, mean: 0.3, std: 0.9, num_times: 7, shift: 2}",)
ALL = (ROWS, PARTITION, shard(0), expert(0), ROUTER, MONOLITH, evaluation("x"))


def make(path: Path, settings: tuple[str, ...] = (), recipe: str = "tiny") -> Run:
    return Run.create(str(path), load_recipe(recipe, settings))


def test_all_jobs_of_a_run_share_its_flow(tmp_path: Path) -> None:
    run = make(tmp_path / "run", (*FLOW, "expert.model.analytic_skip="))
    flow, times = Flow("cosine", "noise"), TimeSampling("logit-normal", 0.3, 0.9, 7, 2.0)
    for artifact in (expert(1), ROUTER, MONOLITH):
        job = train_job(run, artifact)
        assert (job.flow, job.times) == (flow, times)
        assert job.objective == (RouterLoss if artifact == ROUTER else ExpertLoss)(flow)
        assert job.spec == (router_spec if artifact == ROUTER else denoiser_spec)(run.config)
        assert job.spec["flow"] == {"path": "cosine", "prediction": "noise"}
    usual = train_job(make(tmp_path / "usual"), MONOLITH)
    assert (usual.flow, usual.times) == (Flow(), TimeSampling())


@pytest.mark.parametrize("field", ["path=cosine", "prediction=noise", "times=discrete", "shift=3"])
def test_the_flow_identifies_networks_and_nothing_else(tmp_path: Path, field: str) -> None:
    no_skip = ("expert.model.analytic_skip=",)
    before, after = make(tmp_path / "a", no_skip), make(tmp_path / "b", (*no_skip, f"flow.{field}"))
    differing = [name for name in ALL if before.identity(name) != after.identity(name)]
    assert differing == [expert(0), ROUTER, MONOLITH]


def test_an_expert_takes_its_share_of_the_batch_and_its_own_rows(tmp_path: Path) -> None:
    batches = ("expert.train.batch=12", "router.train.batch=10", "partition.num_clusters=3")
    run = make(tmp_path / "run", batches)
    jobs = {artifact: train_job(run, artifact) for artifact in (*run.experts, ROUTER, MONOLITH)}
    assert {artifact: job.batch for artifact, job in jobs.items()} == {
        expert(0): 12,
        expert(1): 12,
        expert(2): 12,
        ROUTER: 10,
        MONOLITH: 36,
    }
    everything = (shard(0), shard(1), shard(2))
    assert [job.shards for job in jobs.values()] == [(shard(0),), (shard(1),), (shard(2),), everything, everything]
    assert len({job.key for job in jobs.values()}) == 5


MASKED = ("expert.model.patch_size=2", "expert.train.mask_ratio=0.75", "expert.train.steps=30")


@pytest.mark.parametrize("unmasked", [0, 10])
def test_a_job_masks_all_but_its_last_steps(tmp_path: Path, unmasked: int) -> None:
    run = make(tmp_path / "run", (*MASKED, f"expert.train.unmasked_steps={unmasked}"))
    for artifact in (expert(1), MONOLITH):
        job = train_job(run, artifact)
        masks = [job.masking(step) for step in range(30)]
        assert masks == [Masking(num_tokens=16, num_kept=4)] * (30 - unmasked) + [None] * unmasked
        assert job.objective == ExpertLoss(Flow(), patch_size=2)
    router = train_job(run, ROUTER)
    assert [router.masking(step) for step in (0, 299)] == [None, None]


def test_the_meter_counts_the_tokens_that_each_step_trains_on(tmp_path: Path) -> None:
    unmasked = train_job(make(tmp_path / "whole", MASKED[:1]), MONOLITH)
    row = training_flops_per_row(unmasked.build(), (1, 8, 8))
    assert unmasked.training_flops(7) == 7 * 32 * row
    masked = train_job(make(tmp_path / "masked", (*MASKED, "expert.train.unmasked_steps=10")), MONOLITH)
    kept = training_flops_per_row(unmasked.build(), (1, 8, 8), num_kept=4)
    assert kept < 0.4 * row
    for steps in (0, 1, 20, 21, 30):
        each = [kept if masked.masking(step) else row for step in range(steps)]
        assert masked.training_flops(steps) == 32 * sum(each)
    experts = [train_job(Run.open(str(tmp_path / "masked")), expert(k)).training_flops(30) for k in (0, 1)]
    assert sum(experts) == masked.training_flops(30)
    texts = train_job(make(tmp_path / "texts", ("expert.train.mask_ratio=0.5",), "laion256-k8"), ROUTER)
    assert texts.training_flops(2) == 2 * 1024 * training_flops_per_row(
        weights.build(texts.spec, "meta"), (4, 32, 32), text_tokens=77
    )


@pytest.mark.parametrize("artifact", [ROUTER, MONOLITH])
def test_rows_of_given_shards_are_never_pooled(tmp_path: Path, artifact: Artifact) -> None:
    run = make(tmp_path / "run", ("partition.method=given",))
    assert train_job(run, expert(1)).shards == (shard(1),)
    with pytest.raises(TrainingError, match=f"{artifact}.*never pooled.*once") as failure:
        train_job(run, artifact)
    assert "\n" not in str(failure.value)
