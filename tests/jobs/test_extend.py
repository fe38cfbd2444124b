"""What can be extended, what is refused by a line that says why, and what an extension has of its base."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.config.longer import lengthened, parse_steps
from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError, MissingArtifact
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.extend import extend, extensions
from ddm_ray.jobs.status import survey
from ddm_ray.run.extension import FILE, untouched
from ddm_ray.run.garbage import STATES, leftovers
from ddm_ray.run.graph import MONOLITH, ROUTER, ROWS, expert
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.store.checksummed import seal
from ddm_ray.store.store import Store
from tests.random_run import make_run
from tests.run.artifacts import save_state

pytestmark = pytest.mark.contract

DATA = {"rows", "partition", "references", "beginnings"}
MORE = "expert.train.steps=400"
REFUSED = {
    ("expert.train.stepz=9",): "what can be raised is expert.train.steps, router.train.steps, student.train.steps",
    ("monolith.train.steps=9",): "the monolith trains for as many steps as the experts",
    ("expert.train.steps=many",): "expert.train.steps: a number of steps is a whole number above 0, got 'many'",
    ("expert.train.steps=400", "expert.train.steps=500"): "expert.train.steps is given twice",
    ("expert.train.steps=300",): "expert.train.steps is 300 already, and 300 aren't more",
    ("student.train.steps=299",): "student.train.steps is 300 already",
}
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


@pytest.mark.parametrize("settings", REFUSED, ids=" ".join)
def test_what_cannot_be_raised_is_refused_by_its_field(config: RunConfig, settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        lengthened(config, parse_steps(settings))
    assert REFUSED[settings] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("named", DECAYS)
def test_where_a_step_depends_on_how_many_there_are_the_field_is_named(named: str) -> None:
    with pytest.raises(ConfigError, match=r"^expert\.train\.\w+ is .*can be extended.*init_from") as caught:
        lengthened(load_recipe("tiny", DECAYS[named]), {"expert": 400})
    assert named in str(caught.value)


def test_a_student_has_its_own_schedule_from_then_on(config: RunConfig) -> None:
    longer = lengthened(config, {"student": 400})
    assert longer.student.train == config.student_train.model_copy(update={"steps": 400})
    assert longer.expert == config.expert
    assert untouched(config, longer) == {
        "rows",
        "partition",
        "references",
        "beginnings",
        "experts",
        "router",
        "monolith",
    }
    longer = lengthened(config, {"expert": 400})
    assert untouched(config, longer) == {*DATA, "router"}
    longer = lengthened(config, {"router": 400})
    assert {"experts", "student", "monolith"} <= untouched(config, longer)


def test_a_router_of_samples_is_another_one_once_its_experts_are() -> None:
    config = load_recipe("tiny", ("router.replay=100",))
    assert untouched(config, lengthened(config, {"expert": 400})) == DATA


def test_an_extension_inherits_what_is_finished_and_named_again_is_the_same(made: Run) -> None:
    extended = extend(made, parse_steps((MORE,)))
    assert extended.goes_on == {expert(0): 300, expert(1): 300} and extended.begins_again == (MONOLITH,)
    run = extended.run
    assert run.base and run.base.url == made.url
    states = {each.artifact: each.state for each in survey(run)}
    assert states[ROWS] == states[ROUTER] == "finished" and states[expert(0)] == states[MONOLITH] == "waiting"
    assert run.require(ROUTER).digest == made.require(ROUTER).digest
    assert run.remake(ROUTER).delete == f"{made.url}/router"
    assert extend(made, parse_steps((MORE,))).run.url == run.url
    assert extend(made, parse_steps(("expert.train.steps=500",))).run.url == f"{made.url}/extended/0002"
    assert extensions(made) == [f"{made.url}/extended/{number:04d}" for number in (1, 2)]
    assert not any((Path(run.url) / folder).exists() for folder in ("rows", "partition", "router"))


def test_a_killed_command_is_finished_by_the_next(made: Run) -> None:
    run = extend(made, parse_steps((MORE,))).run
    Store(run.url).delete_one(RUN_FILE)
    assert extend(made, parse_steps(("expert.train.steps=500",))).run.url.endswith("extended/0002")
    assert extend(made, parse_steps((MORE,))).run.url == run.url
    assert Run.open(run.url).config == run.config


def test_without_the_last_state_it_is_refused(made: Run) -> None:
    made.store.delete(f"{expert(1)}/attempts/0002/state")
    with pytest.raises(MissingArtifact, match=r"experts/001 has finished, and its last state is gone.*init_from"):
        extend(made, parse_steps((MORE,)))
    for job in (*made.experts, ROUTER):
        made.store.delete_one(f"{job}/{NAME}")
        made.store.delete(f"{job}/attempts")
    with pytest.raises(ConfigError, match="nothing of that has been trained yet"):
        extend(made, parse_steps((MORE,)))


def test_what_is_not_extended_is_to_be_finished_first(made: Run) -> None:
    made.store.delete_one(f"{expert(1)}/{NAME}")
    with pytest.raises(MissingArtifact, match=r"experts/001 isn't finished, and stays at 300.*expert\.train\.steps"):
        extend(made, parse_steps(("router.train.steps=400",)))
    assert expert(1) in extend(made, parse_steps(("router.train.steps=400", MORE))).goes_on


def test_states_that_are_still_needed_are_no_leftovers(made: Run) -> None:
    jobs = [*made.experts, ROUTER]
    assert {each.artifact for each in leftovers(made) if each.what == STATES} == {*jobs}
    run = extend(made, parse_steps((MORE,))).run
    assert {each.artifact for each in leftovers(made) if each.what == STATES} == {ROUTER}
    assert leftovers(run) == []
    run.store.write(f"{expert(0)}/{NAME}", made.store.read(f"{expert(0)}/{NAME}"))  # as finished
    assert {each.artifact for each in leftovers(made) if each.what == STATES} == {ROUTER, expert(0)}
    Store(run.url).write(FILE, b"spoilt")
    assert not [each for each in leftovers(made) if each.what == STATES]


def test_an_extension_elsewhere_or_altered_is_refused(made: Run, tmp_path: Path) -> None:
    run = extend(made, parse_steps((MORE,))).run
    other = make_run(str(tmp_path / "other"), num_rows=100, settings=("expert.train.learning_rate=0.5",))
    for key in (FILE, RUN_FILE):
        Store(f"{other.url}/extended/0001").write(key, Store(run.url).read(key))
    with pytest.raises(DriftError, match=r"isn't an extension of the run at .*other: expert\.train\.learning_rate"):
        Run.open(f"{other.url}/extended/0001")
    for body in ({"schema": 1, "steps": {}, "inherits": []}, {"schema": 1, "steps": {"a": 1}, "inherits": []}):
        Store(run.url).write(FILE, seal(body))
        with pytest.raises(CorruptArtifact, match="not the record of an extension, steps"):
            Run.open(run.url)
    Store(run.url).write(FILE, seal({"schema": 1, "steps": {"expert": 400}, "inherits": ["../../.."]}))
    with pytest.raises(CorruptArtifact, match="not the record of an extension, inherits"):
        Run.open(run.url)


def test_the_command_says_where_and_status_names_both(made: Run) -> None:
    def ddm(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.main, [*words])
        return done.exit_code, done.output

    code, text = ddm("extend", made.url, MORE)
    url = f"{made.url}/extended/0001"
    assert code == 0 and "experts/000 goes on from step 300\n" in text and f"next: ddm train {url} expert 0\n" in text
    assert "warning: monolith begins again at step 0: its last state is gone" in text
    assert f"extended by {url}" in ddm("status", made.url)[1]
    assert f"extended by {url}" in ddm("watch", made.url, "--once")[1]
    assert f"continues {made.url}, and shares its rows and partition" in ddm("status", url)[1]
    shown = json.loads(ddm("status", made.url, "--json")[1])
    known = [shown[name] for name in ("run", "name", "base", "appends", "extensions")]
    assert known == [made.url, made.config.name, None, 0, [{"url": url}]]
    states = {each["artifact"]: (each["state"], each["done"]) for each in shown["artifacts"]}
    assert states["experts/000"] == ("finished", 1.0) and states["student"] == ("waiting", 0.0)
    code, text = ddm("extend", made.url, "expert.train.steps=3")
    assert code == 1 and text == "error: expert.train.steps is 300 already, and 3 aren't more\n"
    assert extensions(made) == [url]
