"""An extension equals a run begun with more steps, to the bit, and changes no byte of what it extends."""

import shutil
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import load
from torch import Tensor

from ddm_ray.config.derive import ChangeRequest
from ddm_ray.errors import Preempted
from ddm_ray.jobs.attempts import SavedState, saved_states
from ddm_ray.jobs.derive import plan_derivation
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, ROUTER, STUDENT, Artifact
from ddm_ray.run.run import Run
from ddm_ray.train import worker
from ddm_ray.train.state import SavedParts
from tests.derived import extend
from tests.random_run import make_data
from tests.train.conftest import SHORT

pytestmark = pytest.mark.contract

EXPERT, OTHER = Artifact("experts/001"), Artifact("experts/000")
LONGER = ("expert.train.steps=20", "router.train.steps=17")
SETTINGS = (*SHORT, "student.start=largest")


def train(run: Run, artifact: Artifact) -> None:
    worker.train(run.url, artifact, TrainPlacement())


def state_of(run: Run, artifact: Artifact) -> dict[str, Tensor]:
    """The last state: weights, moments and EMA, piece by piece."""
    saved = next(iter(saved_states(run.store, artifact)))
    assert isinstance(saved, SavedState)
    parts = SavedParts(run.store, saved.prefix, saved.manifest)
    pieces = {f"{part.record} {name}": each for part in parts.parts for name, each in parts.tensors(part).items()}
    return {**pieces, **load(parts.read("curve.safetensors"))}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def files_of(run: Run) -> dict[str, str]:
    """Digests of all files of a run but notes of runs that were derived from it."""
    root = Path(run.url)
    paths = [path for path in root.rglob("*") if path.is_file() and "derived" not in path.relative_to(root).parts]
    return {str(path.relative_to(root)): sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def trained(world_of_one: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose experts, router, monolith and student are finished."""
    run = make_data(str(tmp_path_factory.mktemp("extended") / "run"), settings=SETTINGS)
    for artifact in (OTHER, EXPERT, ROUTER, MONOLITH, STUDENT):
        train(run, artifact)
    return run


@pytest.fixture(scope="module")
def begun_with_more(world_of_one: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_data(str(tmp_path_factory.mktemp("extended") / "more"), settings=(*SETTINGS, *LONGER))


@pytest.mark.parametrize("artifact", [EXPERT, ROUTER, MONOLITH])
def test_it_equals_a_run_begun_with_more_steps(trained: Run, begun_with_more: Run, artifact: Artifact) -> None:
    before = files_of(trained)
    planned = plan_derivation(trained, ChangeRequest(LONGER))
    assert {each: planned.fates[each].step for each in planned.of("continued")} == dict.fromkeys(
        (OTHER, EXPERT, ROUTER, MONOLITH), 12
    )
    run = extend(trained, *LONGER)
    assert run.fingerprint == begun_with_more.fingerprint
    train(run, artifact)
    train(begun_with_more, artifact)
    assert same(state_of(run, artifact), state_of(begun_with_more, artifact))
    ours, theirs = run.require(artifact), begun_with_more.require(artifact)
    assert ours.info["step"] == theirs.info["step"] == (17 if artifact == ROUTER else 20)
    assert ours.files == theirs.files and ours.identity == theirs.identity
    assert files_of(trained) == before
    assert trained.require(artifact).info["step"] == 12


def test_a_student_goes_on_with_its_teachers_and_begins_anew_with_others(trained: Run) -> None:
    before = files_of(trained)
    goes_on = extend(trained, "student.train.steps=20")
    train(goes_on, STUDENT)
    own = goes_on.config.student_train.model_dump_json()
    fresh = make_data(f"{trained.url}-student", settings=(*SETTINGS, f"student.train={own}"))
    for artifact in (*fresh.experts, STUDENT):
        train(fresh, artifact)
    assert goes_on.require(STUDENT).files == fresh.require(STUDENT).files
    assert same(state_of(goes_on, STUDENT), state_of(fresh, STUDENT))

    taught_by_others = extend(trained, *LONGER)
    assert taught_by_others.predecessors(STUDENT) == ()
    for artifact in (*taught_by_others.experts, STUDENT):
        train(taught_by_others, artifact)
    assert taught_by_others.require(STUDENT).info["step"] == 20
    assert taught_by_others.predecessors(STUDENT) == ()
    assert {*before.items()} == {*files_of(trained).items()}


def test_it_goes_on_from_whatever_is_reached_and_may_be_extended_again(
    short_run: Run, begun_with_more: Run, world_of_one: None
) -> None:
    """Begun while its base trains, killed, and extended itself; a damaged state is passed over."""
    left = count(1)
    with pytest.raises(Preempted):
        worker.train(short_run.url, EXPERT, TrainPlacement(checkpoint_steps=3), notice=lambda: next(left) == 7)
    first = extend(short_run, "expert.train.steps=15")
    second = extend(short_run, "expert.train.steps=20")
    reached = next(iter(saved_states(short_run.store, EXPERT)))
    assert isinstance(reached, SavedState) and reached.step == 7
    spoilt = next(Path(short_run.url, reached.prefix).rglob("*.safetensors"))
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"x")
    train(first, EXPERT)
    third = extend(first, "expert.train.steps=20")
    assert [run.url for run in third.predecessors(EXPERT)] == [first.url, short_run.url]
    shutil.rmtree(Path(first.url, EXPERT, "attempts/0001/state"))
    train(begun_with_more, EXPERT)
    for run in (second, third):
        train(run, EXPERT)
        assert same(state_of(run, EXPERT), state_of(begun_with_more, EXPERT))
    train(short_run, EXPERT)
    assert short_run.require(EXPERT).info["step"] == 12 and first.require(EXPERT).info["step"] == 15
