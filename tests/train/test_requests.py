"""What is asked of a real S3 server, counted on the wire: nothing is listed without need."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.observer import Observer
from ddm_ray.jobs.status import survey
from ddm_ray.placement import TrainPlacement
from ddm_ray.store.retries import LONG_RETRIES
from ddm_ray.train import worker
from tests.data.s3 import BUCKET, s3_server, upload
from tests.jobs.attempts import beat
from tests.jobs.fleet import ATTEMPTS, make_fleet
from tests.random_run import make_data
from tests.s3_wire import Fault, Wire, leading_through
from tests.train.conftest import SHORT

pytestmark = pytest.mark.contract

TRAINING, FINISHED = 3, 2


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server, leading_through(server) as wire:
        yield wire


def test_a_look_at_a_run(wire: Wire) -> None:
    """A listing of experts, router, monolith, student and evaluations; and a heartbeat a job that trains."""
    run = make_fleet(f"s3://{BUCKET}/fleet", TRAINING + FINISHED + 3, TRAINING, FINISHED)
    observer, number = Observer(run, partial(survey, run)), 1

    def look(now: float) -> dict[str, int]:
        nonlocal number
        number += 1
        for artifact in run.experts[FINISHED : FINISHED + TRAINING]:
            beat(Attempt(run.store, artifact, ATTEMPTS), number, 280 + number)
        since = len(wire.requests)
        states = [status.state for status in observer.look(now) if status.artifact in run.experts]
        assert states == ["finished"] * FINISHED + ["begun"] * TRAINING + ["waiting"] * 3
        return dict(wire.counts(since))

    assert look(0) == {"LIST": 5 + 3, "GET": TRAINING + 3 * FINISHED + 8}, "the first reads all manifests"
    assert look(15) == {"LIST": 5, "GET": TRAINING}
    assert look(600) == {"LIST": 5, "GET": TRAINING}
    assert [look(600 + 15 * tick) for tick in (1, 2, 3)] == [{"GET": TRAINING}] * 3
    assert look(660) == {"LIST": 5, "GET": TRAINING}


@pytest.mark.usefixtures("world_of_one")
def test_steps_ask_for_nothing_but_beats(wire: Wire, tmp_path: Path) -> None:
    """Sixty steps are no more requests than twelve, whatever they take: only heartbeats and curves are written."""
    asked = []
    for steps in (12, 60):
        made = make_data(str(tmp_path / f"{steps}"), settings=(*SHORT, f"expert.train.steps={steps}"))
        url = upload(Path(made.url), f"steps-{steps}")
        since = len(wire.requests)
        worker.train(url, made.experts[0], TrainPlacement(checkpoint_steps=10**6))
        names = [(one.kind, one.key.replace(f"{steps:09d}", "last").partition("/")[2]) for one in wire.requests[since:]]
        asked.append(sorted(name for name in names if not name[1].endswith("/HEARTBEAT") and "/events." not in name[1]))
    few, many = ([name for name in names if name[0] != "GET"] for names in asked)
    assert few == many
    assert abs(len(asked[0]) - len(asked[1])) <= 3, "reads"
    assert sum(kind == "LIST" for kind, _ in few) <= 12


@pytest.mark.usefixtures("world_of_one")
def test_what_storage_will_not_delete_or_draw_is_waited_for_by_nobody(
    wire: Wire, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As S3 denies it where its keeper gave no leave to delete; the curves are denied, too."""
    made = make_data(str(tmp_path / "run"), settings=SHORT)
    url = upload(Path(made.url), "denied")
    rules = {r"^POST .*\?delete": Fault.KEYS_DENIED, "/tensorboard/": Fault.DENIED}
    wire.rule = lambda one: next((fault for pattern, fault in rules.items() if one.matches(pattern)), None)
    since = len(wire.requests)
    try:
        retry_policy = replace(LONG_RETRIES, seconds=30, first_pause=0.01, longest_pause=0.05)
        worker.train(url, made.experts[0], TrainPlacement(checkpoint_steps=4, keep_states=1), retry_policy=retry_policy)
    finally:
        wire.rule = lambda _: None
    met = [one for one in wire.requests[since:] if one.fault]
    assert 1 <= sum(one.kind in ("DELETE", "POST") for one in met) <= 4, "one for each state, and one in the end"
    assert 1 <= sum(one.kind == "PUT" for one in met) <= 4, "likewise, of the curves"
    printed = capfd.readouterr().err
    assert printed.count("old states stay") == 1 and printed.count("warning: ") == 2
