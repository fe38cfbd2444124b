"""The student's objective against exact experts, and its training: who taught, in which order, whatever happens."""

import json
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddm_ray.config import SamplingSettings
from ddm_ray.core.flow import Flow
from ddm_ray.core.routing import parse_strategy
from ddm_ray.errors import CorruptArtifact, MissingArtifact, Preempted
from ddm_ray.jobs.attempts import claimed
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import STUDENT, Artifact
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.run_models import load_trained
from ddm_ray.store.store import Store
from ddm_ray.train import teachers, worker
from ddm_ray.train.job import train_job
from ddm_ray.train.objectives import Batch, DistillLoss
from ddm_ray.train.teachers import Teachers, first_model, offloaded_teachers
from tests.core.closed_forms import FiniteData, digits
from tests.core.oracles import finite_points
from tests.random_run import make_run
from tests.train.background import Background
from tests.train.results import curve_of, difference, weights_of

pytestmark = pytest.mark.contract

LINEAR = Flow()
STUDENT_STEPS = (
    "partition.num_clusters=3",
    "expert.train.steps=10",
    "expert.train.batch=16",
    "student.train={steps: 10, batch: 12, learning_rate: 1.0e-3, ema_decay: 0.5}",
)


class Answer(nn.Module):
    """The same prediction for every row: what a network would say at one x and t."""

    def __init__(self, like_CHW: Tensor) -> None:
        super().__init__()
        self.answer_CHW = nn.Parameter(like_CHW.clone())

    def forward(self, x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        return self.answer_CHW.expand_as(x_BCHW)


def all_ways(system: FiniteData, x_CHW: Tensor, t: float) -> tuple[Batch, Tensor]:
    """Every datum with the noise that takes it to x at t: a batch, and the posterior probability of each."""
    t_B = torch.full((len(system.points_ND),), t, dtype=torch.float64)
    data_BCHW = system.points_ND.view(-1, *system.shape)
    noise_BCHW = (x_CHW - (1 - t) * data_BCHW) / t
    null_B = torch.full((len(t_B),), system.num_classes)
    weight_B = system.log_weights(x_CHW.flatten()[None], t_B[:1], null_B[:1], slice(None)).softmax(dim=1)[0]
    return Batch(data_BCHW, noise_BCHW, t_B, null_B, system.cluster_N), weight_B


def gradient_at_the_mixture(teachers: Teachers, t: float, data_weight: float = 0.0) -> float:
    """Gradient of the expected loss where a student answers as the mixture does, relative to that answer."""
    system = digits()
    x_CHW = finite_points(1, t, seed=3)[0][0]
    batch, weight_B = all_ways(system, x_CHW, t)
    right_BCHW = system.field_of(None)(x_CHW[None], batch.t_B[:1], batch.condition[:1])
    student = Answer(right_BCHW[0])
    loss_B = DistillLoss(LINEAR, data_weight=data_weight)(student, teachers.taught(batch))
    (loss_B * weight_B).sum().backward()
    gradient = student.answer_CHW.grad
    assert gradient is not None
    return float(gradient.norm() * gradient.numel() / 2 / right_BCHW.norm())


def exact_teachers(**fields: Any) -> Teachers:
    system = digits()
    return Teachers(system.experts, "linear", lambda count: torch.full((count,), system.num_classes), **fields)


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("data_weight", [0.0, 0.3])
def test_the_best_student_of_labelled_teachers_is_the_mixture(t: float, data_weight: float) -> None:
    """E[u_label(x_t) | x_t] = u(x_t), to rounding, and data's own velocities have the same mean."""
    assert gradient_at_the_mixture(exact_teachers(), t, data_weight) < 1e-12


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_the_full_ensemble_teaches_the_mixture_row_by_row(t: float) -> None:
    teachers = exact_teachers(strategy=parse_strategy("full", 4), router=digits().router)
    assert gradient_at_the_mixture(teachers, t) < 1e-12


class ByArgmax(Teachers):
    def _weights(self, x_BCHW: Tensor, t_B: Tensor, condition: Any, cluster_B: Tensor) -> Tensor:
        likeliest_B = digits().router(x_BCHW, t_B, condition).argmax(dim=1)
        return super()._weights(x_BCHW, t_B, condition, likeliest_B)


class ByChance(Teachers):
    def _weights(self, x_BCHW: Tensor, t_B: Tensor, condition: Any, cluster_B: Tensor) -> Tensor:
        return super()._weights(x_BCHW, t_B, condition, torch.arange(len(cluster_B)) % len(self.experts))


class AtAnotherTime(Teachers):
    def _predicted(self, x_BCHW: Tensor, t_B: Tensor, condition: Any, weights_BK: Tensor, used_BK: Any) -> Tensor:
        return super()._predicted(x_BCHW, 1 - t_B, condition, weights_BK, used_BK)


class Unnormalised(Teachers):
    def _weights(self, x_BCHW: Tensor, t_B: Tensor, condition: Any, cluster_B: Tensor) -> Tensor:
        return 0.9 * super()._weights(x_BCHW, t_B, condition, cluster_B)


@pytest.mark.parametrize("mutant", [ByArgmax, ByChance, AtAnotherTime, Unnormalised])
def test_other_teachers_are_noticed(mutant: type[Teachers]) -> None:
    right = exact_teachers()
    assert gradient_at_the_mixture(mutant(right.experts, "linear", right.null), 0.9) > 0.01


@pytest.mark.parametrize("strategy", ["full", "top-2", "threshold-0.2", "nucleus-0.8"])
@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
def test_an_ensemble_predicts_what_the_sampler_does(strategy: str, guidance_scale: float) -> None:
    system, t = digits(), 0.8
    x_BCHW, label_B = finite_points(12, t)
    times_B = torch.full((12,), t, dtype=torch.float64)
    teachers = exact_teachers(strategy=parse_strategy(strategy, 4), router=system.router, guidance_scale=guidance_scale)
    batch = Batch(x_BCHW, torch.zeros_like(x_BCHW), torch.zeros(12), label_B, torch.zeros(12, dtype=torch.long))
    settings = SamplingSettings(strategy=strategy, guidance_scale=guidance_scale)
    right = driver.mixture_velocity(x_BCHW, t, label_B, system.info(), system.experts, system.router, settings=settings)
    # The batch is clean, so that x_t is x; the networks are told the time that it is at.
    later = Teachers(
        [lambda x, _, c, field=field: field(x, times_B[: len(x)], c) for field in system.experts],
        "linear",
        teachers.null,
        teachers.strategy,
        lambda x, _, c: system.router(x, times_B[: len(x)], c),
        guidance_scale,
    )
    predicted = later.taught(batch).teacher_BCHW
    assert predicted is not None
    assert (predicted - right).abs().max() < 1e-10


def trained(path: Any, *settings: str, **placement: Any) -> Run:
    run = make_run(str(path), settings=(*STUDENT_STEPS, *settings), num_rows=120)
    worker.train(run.url, STUDENT, TrainPlacement(**placement))
    return run


@pytest.fixture(scope="module")
def undisturbed(world_of_one: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose student was trained without an interruption, all teachers at hand."""
    return trained(tmp_path_factory.mktemp("student") / "run")


def test_experts_of_an_object_store_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they are fetched; each time the copy is verified, and in the end it is gone."""
    local, store = make_run(str(tmp_path / "run"), settings=STUDENT_STEPS, num_rows=120), Store("memory:///")
    for folder in ("partition", "experts"):
        for key in local.store.sizes(folder):
            store.write(f"{folder}/{key}", local.store.read(f"{folder}/{key}"))
    run, right = Run(store, local.config), [load_trained(local, artifact) for artifact in local.experts]
    asked, read, fetch = list[str](), Store.read, Store.fetch
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    monkeypatch.setattr(
        Store, "read", lambda self, key, *most, **how: asked.append(key) or read(self, key, *most, **how)
    )
    monkeypatch.setattr(Store, "fetch", lambda self, key, path: asked.append(key) or fetch(self, key, path))
    rows = torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([1, 2])
    with offloaded_teachers(run, None, torch.device("cpu"), 2) as loaded:
        for cluster in (0, 1, 2, 0, 1, 2):
            expert = loaded.experts[cluster]
            assert isinstance(expert, nn.Module)
            for parts in ("named_parameters", "named_buffers"):  # these aren't all in a state_dict
                ours, theirs = (dict(getattr(each, parts)()) for each in (expert, right[cluster]))
                assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
            assert torch.allclose(expert(*rows), right[cluster](*rows), atol=1e-5)
        assert sorted(key[:11] for key in asked if key.endswith("ema.safetensors")) == sorted(run.experts)
        for copy in (tmp_path / "copies").rglob("ema.safetensors"):
            copy.write_bytes(copy.read_bytes()[:-1] + b"?")
        with pytest.raises(CorruptArtifact, match="checksum"):
            loaded.experts[0]
    assert not [*(tmp_path / "copies").rglob("ema.safetensors")]


def test_a_student_goes_on_to_the_bit(undisturbed: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = make_run(str(tmp_path / "run"), settings=STUDENT_STEPS, num_rows=120), count(1)
    began: list[Run] = []
    monkeypatch.setattr(worker, "first_model", lambda *job: began.append(run) or first_model(*job))
    with pytest.raises(Preempted):
        worker.train(run.url, STUDENT, TrainPlacement(), notice=lambda: next(steps) == 4)
    worker.train(run.url, STUDENT, TrainPlacement())
    assert began == [run], "what goes on from a state reads no weights to begin with"
    assert difference(curve_of(undisturbed, STUDENT), curve_of(run, STUDENT)) == 0
    assert difference(weights_of(undisturbed, STUDENT), weights_of(run, STUDENT)) == 0


def test_two_teachers_at_a_time_teach_the_same(
    undisturbed: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three, so that one is fetched again in each step; the next step begins with those that are there."""
    fetched, fetch = list[str](), teachers.parse_network

    def counted(described: bytes, tensors: bytes, where: str, *others: Any) -> Any:
        fetched.append(where)
        return fetch(described, tensors, where, *others)

    monkeypatch.setattr(teachers, "parse_network", counted)
    run = trained(tmp_path / "run", teachers=2, micro_batch=5)
    assert len(fetched) == 3 + 9, "three for the first of ten steps, then one each"
    assert difference(weights_of(undisturbed, STUDENT), weights_of(run, STUDENT)) < 1e-5
    untaught = first_model(run, train_job(run, STUDENT)).state_dict()
    assert (
        difference(
            weights_of(undisturbed, STUDENT), {name: untaught[name] for name in weights_of(undisturbed, STUDENT)}
        )
        > 1e-3
    )


@pytest.mark.usefixtures("world_of_one")
def test_ranks_are_taught_as_one_is(tmp_path: Path) -> None:
    """Each rank of two, then of four, the last of which has one row of three, asks two experts at a time."""
    ten = "student.train.batch=10"
    alone = trained(tmp_path / "alone", ten)
    legs = [{"world": 2, "stop": 4, "teachers": 2}, {"world": 4, "teachers": 2, "micro_batch": 2}]
    cases = {"run": {"settings": [*STUDENT_STEPS, ten], "artifact": STUDENT, "legs": legs}}
    Background("ranks", str(tmp_path), json.dumps(cases)).finish()
    run = Run.open(str(tmp_path / "run"))
    assert claimed(run.store, STUDENT) == [1, 2]
    assert difference(curve_of(alone, STUDENT), curve_of(run, STUDENT)) < 1e-5
    assert difference(weights_of(alone, STUDENT), weights_of(run, STUDENT)) < 1e-5


def test_a_score_is_weighed_as_an_experts_and_tokens_that_are_left_out_count_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    data, noise, answer, taught = torch.randn(4, 3, 1, 4, 4, generator=generator, dtype=torch.float64)
    t_B, where = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64), (torch.zeros(3), torch.zeros(3, dtype=torch.long))
    kept_BM = torch.tensor([[0], [3], [1]])
    batch = Batch(data, noise, t_B, *where, kept_BM=kept_BM, teacher_BCHW=taught)

    class Says(nn.Module):
        def forward(self, *asked: Tensor) -> Tensor:
            return answer

    loss_B = DistillLoss(Flow("linear", "score"), patch_size=2)(Says(), batch)
    error = (answer - taught) * t_B[:, None, None, None]  # sigma is t
    right = [error[0, 0, :2, :2], error[1, 0, 2:, 2:], error[2, 0, :2, 2:]]
    assert torch.allclose(loss_B, torch.stack([part.square().mean() for part in right]))


def test_teachers_are_part_of_what_a_student_is(undisturbed: Run, tmp_path: Any) -> None:
    manifest = undisturbed.require(STUDENT)
    assert {"experts/000", "experts/001", "partition"} <= manifest.identity.inputs.keys()
    run = make_run(str(tmp_path / "run"), settings=STUDENT_STEPS, num_rows=120)
    run.store.delete(Artifact("experts/001"))
    with pytest.raises(MissingArtifact, match="experts/001"):
        worker.train(run.url, STUDENT, TrainPlacement())


def test_a_student_costs_what_its_teacher_adds(undisturbed: Run, tmp_path: Any) -> None:
    from ddm_ray.models.flops import forward_flops_per_row, training_flops_per_row

    job = train_job(undisturbed, STUDENT)
    own, asked = training_flops_per_row(job.build(), (1, 8, 8)), forward_flops_per_row(job.build(), (1, 8, 8))
    assert job.training_flops(10) == 10 * 12 * (own + asked)
    assert undisturbed.require(STUDENT).info["training_flops"] == job.training_flops(10)
    guided = make_run(str(tmp_path / "run"), settings=(*STUDENT_STEPS, "student.guidance_scale=2.0"), num_rows=120)
    assert train_job(guided, STUDENT).training_flops(10) == 10 * 12 * (own + 2 * asked)


@pytest.mark.parametrize("start", ["largest", "average"])
def test_a_student_may_begin_as_experts_are(undisturbed: Run, tmp_path: Any, start: str) -> None:
    run = make_run(str(tmp_path / "run"), settings=(*STUDENT_STEPS, f"student.start={start}"), num_rows=130)
    state = first_model(run, train_job(run, STUDENT)).state_dict()
    experts = [weights_of(run, artifact) for artifact in run.experts]
    rows_K = PartitionInfo.of(run.require(Artifact("partition"))).rows_K
    for name in experts[0]:
        stacked = torch.stack([weights[name] for weights in experts])
        right = stacked[rows_K.index(max(rows_K))] if start == "largest" else stacked.mean(dim=0)
        assert torch.allclose(state[name], right, atol=1e-6)
