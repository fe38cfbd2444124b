"""What a derived run keeps, continues and makes again; what is refused by a line that says why."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.cli.derive import sources_of
from ddm_ray.config import load_recipe
from ddm_ray.config.derive import ChangeRequest
from ddm_ray.errors import ConfigError, CorruptArtifact, DDMError, DriftError, MissingArtifact, RunError, StorageError
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.copying import copy, copy_kept
from ddm_ray.jobs.derive import Derivation, plan_derivation
from ddm_ray.jobs.status import survey
from ddm_ray.run.base import FILE, derived_from, digest_of_config, forget_derived, holder_of
from ddm_ray.run.garbage import STATES, leftovers
from ddm_ray.run.graph import MONOLITH, PARTITION, REPORT, ROUTER, ROWS, Artifact, expert, shard
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.store.checksummed import seal
from ddm_ray.store.store import Store
from tests.data.appended import write_digits
from tests.derived import derive, extend
from tests.random_run import make_run
from tests.run.artifacts import save_state

pytestmark = pytest.mark.contract

MORE = "expert.train.steps=400"
DECAYS = {
    "cosine": ("expert.train.schedule=cosine",),
    "linear": ("expert.train.schedule=linear",),
    "unmasked_steps": ("expert.train.mask_ratio=0.5", "expert.train.unmasked_steps=9"),
}


@pytest.fixture
def made(tmp_path: Path) -> Run:
    """A run whose experts and router are finished, with the states that they ended with; its monolith was tidied."""
    run = make_run(str(tmp_path / "run"), num_rows=100)
    for job in (*run.experts, ROUTER):
        save_state(claim(run.store, job), 300, run.identity(job), {"rank-000/a": b"state"}, keep=2)
    return run


def plan(base: Run, *settings: str, **request: object) -> Derivation:
    return plan_derivation(base, ChangeRequest(settings=settings, **request))


def words(planned: Derivation) -> dict[str, str]:
    """The fates of the artifacts that there are in most runs."""
    known = (ROWS, PARTITION, expert(0), expert(1), ROUTER, MONOLITH)
    return {str(each): planned.fates[each].word for each in known if each in planned.fates}


@pytest.mark.parametrize("named", DECAYS)
def test_where_a_step_depends_on_how_many_there_are_the_field_is_named(tmp_path: Path, named: str) -> None:
    run = make_run(str(tmp_path / "run"), num_rows=60, settings=DECAYS[named])
    with pytest.raises(ConfigError, match=r"^expert\.train\.\w+ is .*init_from") as caught:
        plan(run, MORE)
    assert named in str(caught.value)


def test_fewer_steps_are_refused(made: Run) -> None:
    with pytest.raises(ConfigError, match=r"expert.train.steps is 300 in the base, and 3 are fewer"):
        plan(made, "expert.train.steps=3")


@pytest.mark.parametrize(
    ("settings", "kept", "continued"),
    [
        (("sample.steps=3",), {"rows", "partition", "experts/000", "experts/001", "router", "monolith"}, set()),
        ((MORE,), {"rows", "partition", "router"}, {"experts/000", "experts/001"}),
        (("router.train.steps=301",), {"rows", "partition", "experts/000", "experts/001", "monolith"}, {"router"}),
        (("router.model.width=20",), {"rows", "partition", "experts/000", "experts/001", "monolith"}, set()),
        (("experts={1: {model: {width: 16}}}",), {"rows", "partition", "experts/000", "router", "monolith"}, set()),
        (("partition.seed=1",), {"rows"}, set()),
        (("data.heldout=0.2",), set(), set()),
        (("experts={1: {train: {steps: 400}}}",), {"rows", "partition", "experts/000", "router"}, {"experts/001"}),
    ],
)
def test_what_a_setting_leaves_as_it_is(made: Run, settings: tuple[str, ...], kept: set, continued: set) -> None:
    fates = words(plan(made, *settings))
    assert {each for each, word in fates.items() if word == "kept"} | ({"monolith"} & kept) == kept | (
        {"monolith"} & {each for each, word in fates.items() if word == "kept"}
    )
    assert {each for each, word in fates.items() if word == "continued"} == continued


def test_it_keeps_what_is_finished_and_named_again_is_the_same(made: Run) -> None:
    planned = plan(made, MORE)
    assert {each: planned.fates[each].step for each in planned.of("continued")} == {expert(0): 300, expert(1): 300}
    assert planned.fates[MONOLITH].word == "new"
    run = extend(made, MORE)
    assert run.base and run.base.url == made.url
    states = {each.artifact: each.state for each in survey(run)}
    assert states[ROWS] == states[ROUTER] == "finished" and states[expert(0)] == states[MONOLITH] == "waiting"
    assert run.require(ROUTER).digest == made.require(ROUTER).digest
    assert run.remake(ROUTER).delete == f"{made.url}/router"
    assert extend(made, MORE).url == run.url and derived_from(made.store) == [run.url]
    other = extend(made, "expert.train.steps=500")
    assert derived_from(made.store) == sorted([run.url, other.url])
    assert not any((Path(run.url) / folder).exists() for folder in ("rows", "partition", "router"))
    with pytest.raises(StorageError, match=r"lies in .*, which must not be changed"):
        run.store.write(f"{ROUTER}/{NAME}", b"")
    assert run.store.folders("experts") == [] and {*run.store.folders("partition/shards")} == {
        "cluster=000",
        "cluster=001",
    }


def test_a_killed_command_is_finished_by_the_next(made: Run) -> None:
    run = extend(made, MORE)
    Store(run.url).delete_one(RUN_FILE)
    with pytest.raises(RunError):
        Run.open(run.url)
    assert extend(made, MORE).url == run.url
    assert Run.open(run.url).config == run.config


def test_another_run_is_never_overwritten(made: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is or lies in the base"):
        derive(made, MORE, url=made.url)
    other = make_run(str(tmp_path / "other"), num_rows=60)
    with pytest.raises(DriftError, match="is a run that wasn't derived from"):
        derive(made, MORE, url=other.url)
    run = derive(made, MORE, url=str(tmp_path / "more"))
    with pytest.raises(DriftError, match=r"is another run: expert\.train\.steps: 400 -> 500"):
        derive(made, "expert.train.steps=500", url=run.url)


def test_what_a_killed_command_left_is_no_other_runs(made: Run, tmp_path: Path) -> None:
    run = derive(made, MORE, url=str(tmp_path / "more"))
    Store(run.url).delete_one(RUN_FILE)
    other = load_recipe("tiny", ("name=another",))
    with pytest.raises(DriftError, match="another run was being derived here"):
        Run.create(run.url, other)


def test_a_base_that_was_moved_is_found_again_by_the_same_command(made: Run, tmp_path: Path) -> None:
    run = derive(made, MORE, url=str(tmp_path / "more"))
    shutil.move(made.url, tmp_path / "moved")
    with pytest.raises(RunError, match="isn't at"):
        Run.open(run.url)
    moved = Run.open(str(tmp_path / "moved"))
    again = derive(moved, MORE, url=run.url)
    assert again.base and again.base.url == moved.url and again.require(ROUTER)


def test_copying_never_touches_the_record_of_another_run(made: Run, tmp_path: Path) -> None:
    run, other = derive(made, MORE, url=str(tmp_path / "a")), derive(made, "sample.steps=3", url=str(tmp_path / "b"))
    for target in (other, made):
        before = {key: target.store.sizes("").get(key) for key in (FILE, RUN_FILE)}
        record = Store(target.url).read(FILE) if before[FILE] else b""
        with pytest.raises(DriftError, match="is another run"):
            copy(run, target.url, None, lambda share, key: None)
        assert (Store(target.url).read(FILE) if Store(target.url).exists(FILE) else b"") == record
    copy(run, str(tmp_path / "c"), ROUTER, lambda share, key: None)
    copy(run, str(tmp_path / "c"), PARTITION, lambda share, key: None)
    assert Run.open(str(tmp_path / "c")).require(ROUTER) and Run.open(str(tmp_path / "c")).require(PARTITION)


def test_kept_artifacts_count_as_accepted(made: Run, tmp_path: Path) -> None:
    run = derive(made, "acceptance=by_hand", url=str(tmp_path / "more"))
    assert run.require(ROUTER) and not run.by_hand(ROUTER)


def test_without_the_last_state_it_is_refused(made: Run) -> None:
    made.store.delete(f"{expert(1)}/attempts/0002/state")
    with pytest.raises(MissingArtifact, match=r"experts/001 has finished, and its last state is gone.*init_from"):
        plan(made, MORE)
    planned = plan(made, MORE, retrain=(1,))
    assert planned.fates[expert(1)].word == "new" and planned.fates[expert(0)].word == "continued"


def test_what_is_unfinished_is_continued(made: Run) -> None:
    made.store.delete_one(f"{expert(1)}/{NAME}")
    planned = plan(made, "router.train.steps=400")
    assert planned.fates[expert(1)].step == planned.fates[ROUTER].step == 300
    run = extend(made, "router.train.steps=400")
    assert [each.url for each in run.predecessors(expert(1))] == [made.url] and not run.inherits(expert(1))


def test_states_that_are_still_needed_are_no_leftovers(made: Run) -> None:
    jobs = [*made.experts, ROUTER]
    assert {each.artifact for each in leftovers(made) if each.what == STATES} == {*jobs}
    run = extend(made, MORE)
    assert {each.artifact for each in leftovers(made) if each.what == STATES} == {ROUTER}
    assert leftovers(run) == []
    run.store.write(f"{expert(0)}/{NAME}", made.store.read(f"{expert(0)}/{NAME}"))  # as finished
    assert {each.artifact for each in leftovers(made) if each.what == STATES} == {ROUTER, expert(0)}
    Store(run.url).write(FILE, b"spoilt")
    assert not [each for each in leftovers(made) if each.what == STATES]
    shutil.rmtree(run.url)  # or on a disk that isn't there now
    assert not [each for each in leftovers(made) if each.what == STATES]
    forget_derived(made.store, run.url)
    assert {each.artifact for each in leftovers(made) if each.what == STATES} == {*jobs}


def test_an_altered_record_and_another_artifact_are_refused(made: Run) -> None:
    run = extend(made, MORE)
    record = {"schema": 1, "url": made.url, "configuration": digest_of_config(run.config), "kept": {}}
    for body, field in (
        ({**record, "kept": {"../../..": "0" * 16}}, "kept"),
        ({**record, "kept": {"router": "x"}}, "kept.router"),
        ({**record, "url": ""}, "url"),
        ({**record, "schema": 2}, "schema 2"),
    ):
        Store(run.url).write(FILE, seal(body))
        with pytest.raises(CorruptArtifact, match=field):
            Run.open(run.url)
    Store(run.url).write(FILE, seal({**record, "kept": {"router": "0" * 16}}))
    with pytest.raises(DriftError, match="router is another one than the run was derived with"):
        Run.open(run.url).require(ROUTER)
    Store(run.url).write(FILE, seal({**record, "configuration": "0" * 16}))
    with pytest.raises(CorruptArtifact, match=r"base.json: is of another configuration than run.json"):
        Run.open(run.url)
    Store(run.url).write(FILE, seal({**record, "url": f"{made.url}-away"}))
    with pytest.raises(RunError, match=r"the run that it was derived from isn't at .*-away"):
        Run.open(run.url)


def test_runs_on_one_disk_may_be_moved_together(made: Run, tmp_path: Path) -> None:
    run = extend(made, MORE)
    (tmp_path / "elsewhere").mkdir()
    for each in (made, run):
        shutil.move(each.url, tmp_path / "elsewhere" / Path(each.url).name)
    moved = Run.open(str(tmp_path / "elsewhere" / Path(run.url).name))
    assert moved.base and moved.base.url == str(tmp_path / "elsewhere/run") and moved.require(ROUTER)


def test_what_is_copied_needs_no_base(made: Run, tmp_path: Path) -> None:
    run = derive(made, MORE, url=str(tmp_path / "more"))
    copy_kept(run, lambda share, key: None)
    copy_kept(Run.open(run.url), lambda share, key: None)  # a no-op
    shutil.rmtree(made.url)
    own = Run.open(run.url)
    assert own.base is None and all(own.require(each) for each in (ROWS, PARTITION, REPORT, ROUTER, shard(0)))
    for each in (shard(0), ROUTER):
        manifest = own.require(each)
        assert all(own.read(each, name, manifest) for name in manifest.files)
    states = [each for each in Store(own.url).sizes(expert(0)) if "/state/" in each]
    assert len(states) == 2 and own.drift(expert(0), own.identity(expert(0))) == []


@pytest.mark.parametrize(
    ("key", "holder"),
    [
        ("experts/003/attempts/0001/CLAIM", "experts/003"),
        ("partition/shards/cluster=003/train-00000.parquet", "partition/shards/cluster=003"),
        ("partition/_files/x", "partition"),
        ("rows/cluster=008/part-0.parquet", "rows/cluster=008"),
        ("rows/_rejected/a.json", "rows"),
        ("run.json", ""),
    ],
)
def test_the_artifact_of_a_key(key: str, holder: str) -> None:
    assert holder_of(key) == holder and (not holder or Artifact(holder))


def test_the_command_says_what_becomes_of_each_and_status_names_both(made: Run, tmp_path: Path) -> None:
    def ddm(*args: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.main, [*args])
        return done.exit_code, done.output

    url = str(tmp_path / "more")
    code, text = ddm("init", url, "--from", made.url, "--set", MORE, "--dry-run")
    assert code == 0 and "continued  expert 0, from step 300\n" in text and not Path(url).exists()
    assert "kept       rows, shards 0 to 1, partition, router\n" in text
    code, text = ddm("init", url, "--from", made.url, "--set", MORE)
    assert code == 0 and f"next: ddm train {url} all\n" in text and "of what all of them take from the start" in text
    assert f"{url} was derived from it" in ddm("status", made.url)[1]
    assert f"{url} was derived from it" in ddm("watch", made.url, "--once")[1]
    assert f"derived from {made.url}, and keeps " in ddm("status", url)[1]
    shown = json.loads(ddm("status", made.url, "--json")[1])
    known = [shown[name] for name in ("run", "name", "base", "changes", "derived")]
    assert known == [made.url, made.config.name, None, {}, [url]]
    states = {each["artifact"]: (each["state"], each["done"]) for each in shown["artifacts"]}
    assert states["experts/000"] == ("finished", 1.0) and states["student"] == ("waiting", 0.0)
    for words_, message in (
        (("--recipe", "tiny", "--from", made.url), "give --recipe NAME, or --from RUN1"),
        ((), "give --recipe NAME, or --from RUN1"),
        (("--recipe", "tiny", "--drop", "1"), "--drop is for a run that is derived: add --from"),
        (("--from", made.url, "--drop", "5"), "drop 5: the base has clusters 0 to 1"),
        (("--from", made.url, "--add", "digits", "--copy"), "--copy: images that join"),
        (("--from", made.url, "--add", str(tmp_path / "nothing")), "no such folder or file"),
        (("--from", made.url, "--add", "digits", "--clusters", "1", "--clusters", "2"), "--clusters is given 2 times"),
    ):
        code, text = ddm("init", str(tmp_path / "none"), *words_)
        assert code == 1 and text.startswith("error: ") and message in text
    assert not (tmp_path / "none").exists()
    with pytest.raises(DDMError):
        Run.open(str(tmp_path / "none"))


def test_images_that_join_are_looked_at_and_known_ones_are_named(made: Run, tmp_path: Path) -> None:
    write_digits(tmp_path / "scans", range(300, 312))
    more, scans = str(tmp_path / "more"), str(tmp_path / "scans")

    def ddm(*args: str) -> str:
        done = CliRunner().invoke(cli.main, ["init", more, "--from", made.url, *args])
        assert done.exit_code == 0
        return done.output

    text = ddm("--add", made.config.data.source, "--dry-run")
    assert f"digits: is a source of {made.url} already, so its images are there twice" in text
    text = ddm("--add", scans)
    assert f"{scans}: 12 .png" in text and "12 images looked at" in text
    assert "already" not in text and "classes (data" not in text
    assert sources_of(Run.open(more)) == {"digits", scans}
