"""The loop, on real DeepSpeed: resume, damage, rivals, world sizes, precision, cost."""

import json
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from ddm_ray.config import load_recipe
from ddm_ray.errors import DriftError, Preempted, StorageError, TrainingError
from ddm_ray.jobs.attempts import Attempt, claimed
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import ROUTER, Artifact, shard
from ddm_ray.run.info import ShardInfo
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from ddm_ray.train import pictures, worker
from ddm_ray.train.resume import StateChoice
from tests.conftest import wait_for
from tests.infos import commit_written
from tests.random_run import make_data
from tests.train.background import Background
from tests.train.conftest import SHORT
from tests.train.results import curve_of, difference, weights_of

pytestmark = pytest.mark.integration

EXPERT = Artifact("experts/001")
STEPS = 12


def same_run(a: Run, b: Run, artifact: Artifact = EXPERT) -> bool:
    """Whether both were trained alike to the bit, step by step."""
    curves = [curve_of(run, artifact) for run in (a, b)]
    assert all(len(curve["loss"]) == STEPS == a.require(artifact).info["step"] for curve in curves)
    return difference(*curves) == 0 and difference(weights_of(a, artifact), weights_of(b, artifact)) == 0


def train_until(run: Run, step: int, artifact: Artifact = EXPERT, **placement: Any) -> None:
    """Train until that many steps more are done, when the machine is about to go."""
    steps = count(1)
    with pytest.raises(Preempted, match=f"^{artifact}: asked to leave"):
        worker.train(run.url, artifact, TrainPlacement(**placement), notice=lambda: next(steps) == step)


def states_of(run: Run, attempt: int) -> list[int]:
    """Steps of the states that an attempt left."""
    names = run.store.folders(f"{EXPERT}/attempts/{attempt:04d}/state")
    return [int(name.removeprefix("step-")) for name in names]


def test_rows_changed_during_training_are_drift(world_of_one: None, short_run: Run) -> None:
    """The record names the rows that were trained on, not those that lie there at the end."""
    steps = count(1)

    def notice() -> bool:
        if next(steps) == 6:
            info = ShardInfo.of(short_run.require(shard(1)))
            short_run.store.delete(shard(1))
            short_run.store.write(f"{shard(1)}/train-00000.parquet", b"other rows")
            commit_written(short_run, shard(1), ["train-00000.parquet"], info)
        return False

    worker.train(short_run.url, EXPERT, TrainPlacement(checkpoint_steps=8), notice=notice)
    with pytest.raises(DriftError, match="input partition/shards/cluster=001"):
        short_run.require(EXPERT)


@pytest.mark.parametrize("artifact", [EXPERT, ROUTER])
def test_resume_equals_uninterrupted_to_the_bit(quiet: Run, short_run: Run, artifact: Artifact) -> None:
    train_until(short_run, 5, artifact)
    train_until(short_run, 2, artifact)
    assert short_run.manifest(artifact) is None
    worker.train(short_run.url, artifact, TrainPlacement(checkpoint_steps=4))
    assert same_run(quiet, short_run, artifact)
    assert claimed(short_run.store, artifact) == [1, 2, 3]
    infos = [{key: run.require(artifact).info[key] for key in ("step", "loss")} for run in (quiet, short_run)]
    assert infos[0] == infos[1]
    worker.train(short_run.url, artifact, TrainPlacement())
    assert claimed(short_run.store, artifact) == [1, 2, 3], "a finished job claims no attempt"
    notes = [Attempt(short_run.store, artifact, number).failure() for number in (1, 2, 3)]
    assert [note and (note["kind"], note["final"]) for note in notes] == [("Preempted", False)] * 2 + [None]


@pytest.mark.parametrize("damaged", ["the newest", "all"])
def test_damaged_states_are_named_and_the_one_before_used(
    quiet: Run, short_run: Run, capfd: pytest.CaptureFixture[str], damaged: str
) -> None:
    train_until(short_run, 4)
    train_until(short_run, 5)
    attempts = Path(short_run.url) / EXPERT / "attempts"
    paths = [
        attempts / "0002/state/step-000000009/rank-000/exp_avg-0000.safetensors",
        attempts / "0001/state/step-000000004/rank-000/value-0000.safetensors",
    ]
    wrong = paths[: 1 if damaged == "the newest" else 2]
    for path in wrong:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    worker.train(short_run.url, EXPERT, TrainPlacement())
    stderr = capfd.readouterr().err
    assert [str(path) in stderr for path in paths] == [path in wrong for path in paths]
    assert same_run(quiet, short_run)


@pytest.mark.parametrize("taken", [("0002",), ("0001", "0002")])
def test_states_that_a_rival_deletes_meanwhile_are_not_begun_without(
    quiet: Run, short_run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], taken: tuple[str]
) -> None:
    """Between the choice of a state and reading it: then there are newer ones, or it is another attempt's turn."""
    train_until(short_run, 4)
    train_until(short_run, 5)
    choose = StateChoice.next_state

    def choose_late(choice: StateChoice) -> tuple[int, str] | None:
        chosen = choose(choice)
        for number in taken:
            short_run.store.delete(f"{EXPERT}/attempts/{number}/state")
        return chosen

    monkeypatch.setattr(StateChoice, "next_state", choose_late)
    if len(taken) == 2:
        with pytest.raises(StorageError, match="its states were deleted while they were read"):
            worker.train(short_run.url, EXPERT, TrainPlacement())
        assert short_run.manifest(EXPERT) is None
    else:
        worker.train(short_run.url, EXPERT, TrainPlacement())
        assert same_run(quiet, short_run)
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("deleted", "warning"),
    [("", "rank-000: INDEX.json is gone; "), ("rank-000/ema-0000.safetensors", "files are gone; ")],
    ids=["before the last part was written", "after it"],
)
def test_a_state_that_a_newer_attempt_deletes_before_its_commit_is_given_up(
    quiet: Run, short_run: Run, capfd: pytest.CaptureFixture[str], deleted: str, warning: str
) -> None:
    steps, state = count(1), f"{EXPERT}/attempts/0001/state/step-000000004"

    def notice() -> bool:
        if next(steps) == 5:
            # It is committed after this step's exchange at the earliest.
            wait_for(lambda: short_run.store.exists(f"{state}/rank-000/INDEX.json"), 60)
            if deleted:
                short_run.store.delete_one(f"{state}/{deleted}")
            else:
                short_run.store.delete(state)
        return False

    worker.train(short_run.url, EXPERT, TrainPlacement(checkpoint_steps=4, hang_seconds=60), notice=notice)
    assert warning in capfd.readouterr().err
    assert same_run(quiet, short_run) and states_of(short_run, 1) == [STEPS]


def test_a_state_of_another_configuration_is_refused(
    world_of_one: None, short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_until(short_run, 4)
    other = load_recipe("tiny", (*SHORT, "expert.train.learning_rate=0.002"))
    monkeypatch.setattr(Run, "open", classmethod(lambda cls, *_: Run(short_run.store, other)))
    with pytest.raises(DriftError, match=r"expert\.train\.learning_rate: 0\.001 -> 0\.002"):
        worker.train(short_run.url, EXPERT, TrainPlacement())


def test_the_newest_states_are_kept_and_milestones_are_published(quiet: Run, short_run: Run, tmp_path: Path) -> None:
    worker.train(short_run.url, EXPERT, TrainPlacement(checkpoint_steps=5, milestone_steps=6, keep_states=1))
    assert same_run(quiet, short_run)
    assert states_of(short_run, 1) == [STEPS]
    attempt = Attempt(short_run.store, EXPERT, 1)
    assert short_run.store.folders(f"{attempt.prefix}/weights") == ["step-000000006", "step-000000012"]
    half = make_data(str(tmp_path / "half"), settings=(*SHORT, "expert.train.steps=6"))
    worker.train(half.url, EXPERT, TrainPlacement(milestone_steps=2, keep_milestones=2))
    assert half.store.folders(f"{attempt.prefix}/weights") == ["step-000000004", "step-000000006"]
    milestone = load(short_run.store.read(f"{attempt.weights_prefix(6)}/ema.safetensors"))
    assert difference(milestone, weights_of(half, EXPERT)) == 0


def test_pictures_of_states_change_nothing(
    quiet: Run, short_run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Trained alike to the bit, with a picture of each state that is saved beside training, as of published weights."""
    monkeypatch.setattr(pictures, "SHARE", math.inf)
    worker.train(short_run.url, EXPERT, TrainPlacement(checkpoint_steps=5, milestone_steps=10, hang_seconds=60))
    assert same_run(quiet, short_run) and "no picture" not in capfd.readouterr().err
    attempt = Attempt(short_run.store, EXPERT, 1)
    assert [*short_run.store.sizes(f"{attempt.prefix}/pictures")] == ["step-000000005.png"]
    files = list_jobs(short_run.store, [EXPERT])[EXPERT]
    assert files.picture == (STEPS, f"attempts/0001/weights/step-{STEPS:09d}/grid.png")
    half = make_data(f"{short_run.url}-half", settings=SHORT)
    worker.train(half.url, EXPERT, TrainPlacement(milestone_steps=5, pictures=False))
    assert half.store.sizes(f"{attempt.prefix}/pictures") == {}
    beside = half.store.read(f"{attempt.weights_prefix(5)}/grid.png")
    assert short_run.store.read(attempt.picture_key(5)) == beside, "the same weights, painted alike"


def test_a_picture_that_fails_costs_nothing_but_itself(
    quiet: Run, short_run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_memory(*_: object) -> bytes:
        raise MemoryError("not enough")

    monkeypatch.setattr(pictures, "SHARE", math.inf)
    monkeypatch.setattr(pictures, "picture", no_memory)
    worker.train(short_run.url, EXPERT, TrainPlacement(checkpoint_steps=1, hang_seconds=60))
    assert same_run(quiet, short_run) and states_of(short_run, 1) == [STEPS]
    warnings = [line for line in capfd.readouterr().err.splitlines() if "no picture: not enough" in line]
    assert len(warnings) == 2, "one for all states, one for the last weights"
    assert list_jobs(short_run.store, [EXPERT])[EXPERT].picture is None


def test_a_gradient_that_is_not_finite_publishes_nothing(
    world_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddm_ray.train import batches

    run = make_data(str(tmp_path / "run"), settings=(*SHORT, "expert.train.steps=20000"))
    attempt = Attempt(run.store, EXPERT, 1)
    draw, poisoned_steps = batches.draw_batch, []

    def poison(seed: int, key: tuple[int, ...], step: int, *rest: object) -> object:
        draws = draw(seed, key, step, *rest)  # type: ignore[arg-type]
        if run.store.exists(f"{attempt.weights_prefix(4)}/{NAME}"):
            poisoned_steps.append(step)
            draws.noise_BCHW[0, 0, 0, 0] = float("nan")
        return draws

    monkeypatch.setattr(batches, "draw_batch", poison)
    with pytest.raises(TrainingError, match=r"loss nan with gradient norm (nan|inf) at step \d+;") as failure:
        worker.train(run.url, EXPERT, TrainPlacement(checkpoint_steps=3, milestone_steps=4))
    (step,) = poisoned_steps
    assert f"at step {step};" in str(failure.value)
    assert run.manifest(EXPERT) is None
    assert max(states_of(run, 1)) <= step
    assert max(run.store.folders(f"{attempt.prefix}/weights")) <= f"step-{step:09d}"
    note = attempt.failure()
    assert note is not None and note["final"] and f"at step {step}" in note["error"]


def test_micro_batches_do_not_change_the_run(quiet: Run, short_run: Run) -> None:
    worker.train(short_run.url, EXPERT, TrainPlacement(micro_batch=4))
    assert difference(weights_of(quiet, EXPERT), weights_of(short_run, EXPERT)) < 1e-5


ZERO = [*((stage, "fp32") for stage in range(4)), (1, "bf16"), (3, "bf16")]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Real ranks over gloo: every ZeRO stage, begun by 2, gone on with by 3 (unequal shares), ended by 1."""
    legs = [{"world": 2, "stop": 5}, {"world": 3, "stop": 9, "micro_batch": 1}, {"world": 1}]
    cases: dict[str, Any] = {
        f"{stage}-{precision}": {
            "settings": [*SHORT, f"expert.train.precision={precision}"],
            "legs": [leg | {"zero_stage": stage} for leg in legs],
        }
        for stage, precision in ZERO
    }
    cases["whole-bf16"] = {"settings": cases["1-bf16"]["settings"], "legs": [{"world": 1}]}
    folder = tmp_path_factory.mktemp("worlds")
    Background("ranks", str(folder), json.dumps(cases)).finish()
    return lambda name: Run.open(str(folder / name))


@pytest.mark.parametrize(("zero_stage", "precision"), ZERO)
def test_the_curve_is_the_same_across_resizes(
    quiet: Run, worlds: Callable[[str], Run], zero_stage: int, precision: str
) -> None:
    undisturbed, cut = quiet if precision == "fp32" else worlds("whole-bf16"), worlds(f"{zero_stage}-{precision}")
    assert claimed(cut.store, EXPERT) == [1, 2, 3]
    most = 1e-6 if precision == "fp32" else 2e-3
    assert difference(curve_of(undisturbed, EXPERT), curve_of(cut, EXPERT)) < most
    # AdamW's first steps are as long where a gradient is nearly zero, and its sign is then chance in bf16.
    flipped = 1e-6 if precision == "fp32" else 4 * undisturbed.config.expert.train.learning_rate
    assert 0 < difference(weights_of(undisturbed, EXPERT), weights_of(cut, EXPERT)) < flipped


def test_precision_matters(quiet: Run, worlds: Callable[[str], Run]) -> None:
    """Else the test before this one would say nothing of bf16."""
    assert 1e-5 < difference(weights_of(quiet, EXPERT), weights_of(worlds("whole-bf16"), EXPERT)) < 2e-2
