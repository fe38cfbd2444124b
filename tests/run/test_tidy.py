"""Tidying lists and deletes what nothing needs, and nothing else: of a job that has only begun not a byte."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.status import survey
from ddm_ray.run.chunk_records import PLAN
from ddm_ray.run.garbage import (
    CHUNKS,
    MILESTONES,
    STATES,
    UNFINISHED,
    UNFINISHED_SECONDS,
    WEIGHTS,
    delete_garbage,
    leftovers,
)
from ddm_ray.run.graph import MONOLITH, PARTITION, ROUTER, ROWS, evaluation, expert
from ddm_ray.run.manifest import NAME, Identity
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.published import publish_weights
from tests.random_run import make_run
from tests.run.artifacts import save_state

DONE, BEGUN = expert(0), expert(1)
STRAY = "part-000000-000001-0123abcd.parquet"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("tidy") / "run"), num_rows=100)


@pytest.fixture(params=["disk", "bucket"])
def run(request: pytest.FixtureRequest, made: Run, tmp_path: Path) -> Run:
    """A run with an expert that is finished, one that was begun again, and leftovers below both."""
    store = Store(str(tmp_path / "run") if request.param == "disk" else "memory:///")
    for key in _keys(made):
        store.write(key, made.store.read(key))
    store.delete_one(f"{BEGUN}/{NAME}")
    for job in (DONE, BEGUN):
        attempt = claim(store, job)
        save_state(attempt, 5, Identity({}), {"rank-000/a": b"x" * 1000}, keep=2)
        publish_weights(attempt, 4, Identity({}), {"ema.safetensors": b"x" * 300})
        store.write(f"{attempt.weights_prefix(3)}/ema.safetensors", b"x" * 70)
        store.write(f"{attempt.prefix}/tensorboard/events.1", b"curves")
    store.write(f"{ROWS}/{STRAY}", b"x" * 20)
    store.write(f"{ROWS}/named-{STRAY}", b"kept")
    store.write(f"{ROWS}/_parts/000000-000001-last.json", f'{{"rejected": ["named-{STRAY}", {{}}]}}'.encode())
    return Run(store, made.config)


def _keys(run: Run) -> list[str]:
    folders = ("rows", "partition", "experts", "router", "monolith")
    return [f"{folder}/{name}" for folder in folders for name in run.store.sizes(folder)]


def objects(run: Run) -> dict[str, bytes]:
    return {key: run.store.read(key) for key in _keys(run)}


def require_undamaged(run: Run) -> None:
    for artifact in (ROWS, PARTITION, DONE, ROUTER, MONOLITH):
        manifest = run.require(artifact)
        for name in manifest.files:
            run.read(artifact, name, manifest)


def test_what_nothing_needs_is_listed_and_goes(run: Run) -> None:
    before = objects(run)
    left = {(each.artifact, each.what): (each.files, each.bytes) for each in leftovers(run)}
    states = sum(len(data) for key, data in before.items() if key.startswith(f"{DONE}/attempts/0002/state/"))
    assert left == {(DONE, STATES): (2, states), (DONE, WEIGHTS): (1, 70), (ROWS, CHUNKS): (1, 20)}
    assert objects(run) == before
    delete_garbage(run, leftovers(run))
    after = objects(run)
    gone = before.keys() - after.keys()
    assert after.items() <= before.items() and len(gone) == 4
    assert all(key.startswith((f"{DONE}/attempts/0002/", f"{ROWS}/{STRAY}")) for key in gone)
    assert f"{DONE}/attempts/0002/weights/step-000000004/ema.safetensors" in after
    assert leftovers(run) == []
    require_undamaged(run)


def test_milestones_go_if_that_is_asked_for_and_no_evaluation_may_measure_them(run: Run) -> None:
    delete_garbage(run, leftovers(run))
    run.store.write(f"{evaluation('demo')}/{PLAN}", b"{}")
    assert leftovers(run, milestones=True) == []
    run.store.delete(evaluation("demo"))
    (left,) = leftovers(run, milestones=True)
    assert (left.artifact, left.what, left.files) == (DONE, MILESTONES, 2)
    delete_garbage(run, [left])
    assert not run.store.sizes(f"{DONE}/attempts/0002/weights")
    assert run.store.sizes(f"{BEGUN}/attempts/0002/weights")
    require_undamaged(run)


def test_files_of_killed_writers_go_a_day_later(made: Run, tmp_path: Path) -> None:
    for key in _keys(made):
        Store(str(tmp_path / "run")).write(key, made.store.read(key))
    run = Run(Store(str(tmp_path / "run")), made.config)
    run.store.delete_one(f"{BEGUN}/{NAME}")
    old, new, obstores = (tmp_path / "run" / DONE / name for name in ("new#12", "new#34", "ema.safetensors#1"))
    begun, ours = tmp_path / "run" / BEGUN / "attempts/new#56", tmp_path / "run" / "a#b"
    for path in (old, new, obstores, begun, ours):
        path.write_bytes(b"x" * 10)
        if path != new:
            os.utime(path, (0, os.stat(path).st_mtime - UNFINISHED_SECONDS - 10))
    (left,) = leftovers(run)
    assert (left.what, left.files, left.bytes) == (UNFINISHED, 2, 20)
    delete_garbage(run, [left])
    assert not old.exists() and not obstores.exists()
    assert new.exists() and begun.exists() and ours.exists()
    require_undamaged(run)


def test_the_command_deletes_only_if_asked_to(made: Run, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    Run.create(str(tmp_path / "run"), made.config)
    for key in _keys(made):
        store.write(key, made.store.read(key))
    save_state(claim(store, DONE), 5, Identity({}), {"rank-000/a": b"x" * 2_000_000}, keep=2)
    for words, answer in (((), "nothing was deleted"), (("--delete",), "deleted"), ((), "nothing is left over")):
        done = CliRunner().invoke(cli.main, ["tidy", str(tmp_path / "run"), *words])
        assert done.exit_code == 0 and done.output.splitlines()[-1].startswith(answer), done.output
        if "nothing is" not in answer:
            assert " 2 MB" in done.output and DONE in done.output
    assert not store.sizes(f"{DONE}/attempts/0002/state")


def test_what_an_older_version_stored_for_students_is_passed_over(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"))
    before = survey(run), leftovers(run)
    run.store.write("targets/cluster=000/_MANIFEST.json", b"{}")
    assert (survey(run), leftovers(run)) == before
