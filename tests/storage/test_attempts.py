"""Attempts: one owner a number, the newest verified state first, and damage told but not in the way."""

import json
from pathlib import Path

import pytest

from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.attempts import KEEP_STATES, SavedState, claim, claimed, heartbeat, saved_states
from ddm_ray.storage.manifest import Identity, Manifest
from ddm_ray.storage.store import Store
from tests.storage.artifacts import flip_bit

JOB = "experts/000"
IDENTITY = Identity({"expert": {"train": {"steps": 300}}}, {"partition/shards/cluster=000": "0f1e"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run"))


def files_of(step: int) -> dict[str, bytes]:
    return {"model.safetensors": f"weights after {step}".encode(), "rank-0/optimizer": b"moments"}


def steps_found(store: Store) -> list[int | str]:
    """Steps of the sound states in the order they are offered, and the damaged file of each damaged one."""
    found: list[int | str] = []
    for state in saved_states(store, JOB):
        if isinstance(state, CorruptArtifact):
            found.append(str(state).split(":")[0].removeprefix(f"{store.url}/{JOB}/attempts/"))
        else:
            found.append(state.step)
    return found


def test_numbers_are_claimed_in_turn(store: Store) -> None:
    assert claimed(store, JOB) == []
    assert [claim(store, JOB).number for _ in range(3)] == [1, 2, 3]
    assert claimed(store, JOB) == [1, 2, 3]
    assert claimed(store, "experts/001") == []
    assert json.loads(store.read(f"{JOB}/attempts/0003/CLAIM")).keys() == {"host", "pid"}


def test_a_number_that_a_rival_took_meanwhile_is_left_to_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(store, JOB)
    with monkeypatch.context() as at_once:
        at_once.setattr("ddm_ray.storage.attempts.claimed", lambda *_: [])
        assert claim(store, JOB).number == 2
    assert store.read(f"{JOB}/attempts/0001/CLAIM") == store.read(f"{JOB}/attempts/0002/CLAIM")


def test_numbers_keep_their_order_beyond_four_digits(store: Store) -> None:
    for number in (2, 9999, 10000):
        store.write(f"{JOB}/attempts/{number:04d}/CLAIM", b"{}")
    store.write(f"{JOB}/attempts/.cache/x", b"")
    assert claimed(store, JOB) == [2, 9999, 10000]
    assert claim(store, JOB).number == 10001


def test_the_heartbeat_is_the_newest_attempts(store: Store) -> None:
    assert heartbeat(store, JOB) is None
    first, second = claim(store, JOB), claim(store, JOB)
    assert heartbeat(store, JOB) is None
    first.beat({"step": 10})
    assert heartbeat(store, JOB) == {"step": 10, "attempt": 1}
    second.beat({"step": 4})
    first.beat({"step": 20})
    assert heartbeat(store, JOB) == {"step": 4, "attempt": 2}
    second.beat({"step": 5})
    assert heartbeat(store, JOB) == {"step": 5, "attempt": 2}


@pytest.mark.parametrize("content", [b"", b'{"step": ', b"[1]", b"\xff"])
def test_a_damaged_heartbeat_is_named(store: Store, content: bytes) -> None:
    claim(store, JOB)
    store.write(f"{JOB}/attempts/0001/HEARTBEAT", content)
    with pytest.raises(CorruptArtifact, match=f"^{store.url}/{JOB}/attempts/0001/HEARTBEAT: not a heartbeat"):
        heartbeat(store, JOB)


def test_states_come_newest_attempt_first_then_latest_step(store: Store) -> None:
    first, second = claim(store, JOB), claim(store, JOB)
    assert steps_found(store) == []
    for attempt, step in ((first, 900), (first, 1000), (second, 20), (second, 100)):
        attempt.save_state(step, IDENTITY, files_of(step), {"loss": 0.5})
    claim(store, JOB)
    assert steps_found(store) == [100, 20, 1000, 900]
    state = next(saved_states(store, JOB))
    assert isinstance(state, SavedState)
    assert state.prefix == f"{JOB}/attempts/0002/state/step-000000100"
    assert state.manifest.identity == IDENTITY
    assert state.manifest.info == {"loss": 0.5}
    for name, content in files_of(100).items():
        assert store.read(f"{state.prefix}/{name}") == content


def test_only_the_newest_states_are_kept(store: Store) -> None:
    attempt = claim(store, JOB)
    saved = [5, 95, 100, 1000, 20_000, 1_000_000]
    for number, step in enumerate(saved, start=1):
        attempt.save_state(step, IDENTITY, files_of(step), {})
        assert steps_found(store) == saved[:number][-KEEP_STATES:][::-1]
    names = store.folders(f"{attempt.prefix}/state")
    assert names == ["step-000020000", "step-001000000"]


@pytest.mark.parametrize("name", ["model.safetensors", "rank-0/optimizer", "_MANIFEST.json"])
def test_a_flipped_bit_yields_the_error_and_then_the_state_before(store: Store, tmp_path: Path, name: str) -> None:
    attempt = claim(store, JOB)
    for step in (100, 200):
        attempt.save_state(step, IDENTITY, files_of(step), {})
    damaged = f"0001/state/step-000000200/{name}"
    flip_bit(tmp_path / "run" / JOB / "attempts" / damaged, position=10 if name == "_MANIFEST.json" else 3)
    assert steps_found(store) == [damaged, 100]


def test_a_state_without_its_manifest_or_a_file_was_never_finished(store: Store, tmp_path: Path) -> None:
    first, second = claim(store, JOB), claim(store, JOB)
    first.save_state(100, IDENTITY, files_of(100), {})
    first.save_state(200, IDENTITY, files_of(200), {})
    second.save_state(300, IDENTITY, files_of(300), {})
    (tmp_path / "run" / second.prefix / "state/step-000000300/_MANIFEST.json").unlink()
    (tmp_path / "run" / first.prefix / "state/step-000000200/model.safetensors").unlink()
    assert steps_found(store) == [100]


def test_weights_are_published_below_the_attempt(store: Store) -> None:
    attempt = claim(store, JOB)
    prefix, manifest = attempt.publish_weights(300, IDENTITY, {"ema.safetensors": b"ema"}, {"step": 300})
    assert prefix == "attempts/0001/weights/step-000000300"
    written = store.read(f"{JOB}/{prefix}/_MANIFEST.json")
    assert Manifest.from_json(written, "there") == manifest
    assert manifest.files["ema.safetensors"].bytes == 3
    assert steps_found(store) == []
