"""Notes are read by type: what is odd in one counts as absent, and no note ends a look at the run."""

import json
from collections import Counter
from typing import Any

import pytest

from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.attempts import Attempt, claim, claimed, saved_states
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.status import status, survey
from ddm_ray.parsing import MAX_DEPTH, parse_object
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.watch.gauges import gauge_values
from tests.jobs.attempts import TOLD, beat
from tests.run.artifacts import save_state

JOB = Artifact("experts/001")
BEAT = {"beat": 1, "step": 75, "steps": 300, **TOLD}
ODD = ("x", None, [], {}, True, -1, 2.5, "NaN", 10**400, float("nan"), float("inf"), [[1]])


@pytest.mark.parametrize("field", BEAT)
def test_a_field_of_a_heartbeat_of_another_type_is_absent(partitioned: Run, field: str) -> None:
    attempt = claim(partitioned.store, JOB)
    for value in ODD:
        attempt.beat({**BEAT, field: value})
        known = attempt.last_beat()
        assert known.items() >= {name: expected for name, expected in BEAT.items() if name != field}.items()
        if (read := known.get(field)) is not None:
            kinds = (str,) if isinstance(BEAT[field], str) else (int, float)
            assert type(read) in kinds and read == value and (isinstance(read, str) or abs(read) < 1e300)
        observed = status(partitioned, JOB)
        assert observed.state == "begun" and "\n" not in describe(observed)
        assert all(isinstance(number, float | int) for number in gauge_values(observed).values())


@pytest.mark.parametrize("value", ODD)
def test_claims_and_launches_are_read_by_type(partitioned: Run, value: Any) -> None:
    store, launch = partitioned.store, Launch(JOB)
    fields = {"host": value, "island": value, "launch": value, "job": value, "pid": value, "most_rows": value}
    store.write(f"{JOB}/attempts/0001/CLAIM", json.dumps(fields).encode())
    store.write(launch.begun_key, json.dumps(fields).encode())
    store.write(f"{JOB}/attempts/0001/FAILED", json.dumps(dict.fromkeys(("error", "kind", "fix"), value)).encode())
    known = Attempt(store, JOB, 1).claim()
    assert all(isinstance(known.get(name, ""), str | None) for name in ("host", "island", "launch", "job"))
    assert isinstance(known.get("most_rows"), int | None) and isinstance(launch.begun(store).get("host", ""), str)
    failure = Attempt(store, JOB, 1).failure()
    assert failure and isinstance(failure["error"], str) and isinstance(failure["kind"], str)
    assert status(partitioned, JOB).state == "failed"


def test_depth_has_an_end() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * levels + b"1" + b"}" * levels

    assert parse_object(nested(MAX_DEPTH))
    for data in (nested(MAX_DEPTH + 1), nested(10**5), b"[" * 10**5, b"[1]", b"", b"\xff", b'{"a":' + b"9" * 5000):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            parse_object(data)


def test_one_odd_artifact_hides_no_other(partitioned: Run) -> None:
    before = {each.artifact: describe(each) for each in survey(partitioned)}
    folder = partitioned.store.local
    assert folder
    (folder / "experts").mkdir(exist_ok=True)
    (folder / JOB).symlink_to("001")
    (folder / "experts" / ("x" * 255)).mkdir()
    after = {each.artifact: (each.state, describe(each)) for each in survey(partitioned)}
    assert after[JOB] == ("damaged", f"{folder}/{JOB}/_MANIFEST.json: Too many levels of symbolic links")
    assert {name: text for name, (_, text) in after.items() if name != JOB} == {
        name: text for name, text in before.items() if name != JOB
    }
    (folder / JOB).unlink()
    (folder / JOB).write_bytes(b"a file")
    assert "Not a directory" in describe(status(partitioned, JOB, list_jobs(partitioned.store, [JOB])[JOB]))


def test_names_of_copies_are_passed_over(partitioned: Run) -> None:
    store = partitioned.store
    attempt = claim(store, JOB)
    beat(attempt, 1, 75)
    save_state(attempt, 50, partitioned.identity(JOB), {"rank-0": b"state"}, keep=2)
    folder = store.local
    assert folder
    state = folder / attempt.state_prefix(50)
    for name in ("step-000000050.bak", "step-50", "step-" + "9" * 200):
        (state.parent / name).mkdir()
        for file in state.iterdir():
            (state.parent / name / file.name).write_bytes(file.read_bytes())
    for name in ("9" * 255, "00001", "1", "\u0663" * 4, "0002.bak"):
        (folder / JOB / "attempts" / name).mkdir()
    assert claimed(store, JOB) == [1]
    states = list(saved_states(store, JOB))
    assert [state.step for state in states if not isinstance(state, CorruptArtifact)] == [50]
    odd = [str(state) for state in states if isinstance(state, CorruptArtifact)]
    assert len(odd) == 3 and all("isn't called as a state is" in text for text in odd)
    assert status(partitioned, JOB).job and claim(store, JOB).number == 2


def test_all_states_are_listed_at_once(partitioned: Run, requests: Counter[str]) -> None:
    attempts = [claim(partitioned.store, JOB) for _ in range(5)]
    save_state(attempts[0], 50, partitioned.identity(JOB), {"rank-0": b"state"}, keep=2)
    requests.clear()
    assert len(list(saved_states(partitioned.store, JOB))) == 1
    assert requests == {"list": 1, "get": 1}
