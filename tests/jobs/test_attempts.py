"""Attempts: one owner a number, the newest verified state first, and damage told but not in the way."""

import json
from collections import Counter
from pathlib import Path

import pytest

from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.jobs.attempts import Attempt, SavedState, claim, claimed, heartbeat, saved_states
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import StateInfo
from ddm_ray.run.manifest import FileRecord, Identity
from ddm_ray.store.disk import UNFINISHED
from ddm_ray.store.store import Store
from tests.published import publish_weights
from tests.run.artifacts import flip_bit, save_state

JOB = Artifact("experts/000")
IDENTITY = Identity({"expert": {"train": {"steps": 300}}}, {"partition/shards/cluster=000": "0f1e"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run"))


def files_of(step: int) -> dict[str, bytes]:
    return {"model.safetensors": f"weights after {step}".encode(), "rank-0/optimizer": b"moments"}


def steps_found(store: Store) -> list[int | str]:
    """Steps of the sound states in the order they are offered, and the damaged file of each damaged one."""
    offered: list[int | str] = []
    for state in saved_states(store, JOB):
        if isinstance(state, CorruptArtifact):
            offered.append(str(state).split(":")[0].removeprefix(f"{store.url}/{JOB}/attempts/"))
        else:
            offered.append(state.step)
    return offered


def test_numbers_are_claimed_in_turn(store: Store) -> None:
    assert claimed(store, JOB) == []
    assert [claim(store, JOB).number for _ in range(3)] == [1, 2, 3]
    assert claimed(store, JOB) == [1, 2, 3]
    assert claimed(store, "experts/001") == []
    assert json.loads(store.read(f"{JOB}/attempts/0003/CLAIM")).keys() == {"host", "pid", "id"}


def test_claiming_ends_where_storage_denies_what_it_lists(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("ddm_ray.jobs.attempts.RIVAL_SECONDS", 0.0)
    monkeypatch.setattr(Store, "create", lambda _, key, data: bool(asked.append(key)))
    with pytest.raises(StorageError, match=f"^{store.url}/{JOB}/attempts/0001 to 0064: storage answers that all"):
        claim(store, JOB)
    assert asked == [f"{JOB}/attempts/{number:04d}/CLAIM" for number in range(1, 65)]


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


def test_states_come_newest_attempt_first_then_latest_step(store: Store) -> None:
    first, second = claim(store, JOB), claim(store, JOB)
    assert steps_found(store) == []
    for attempt, step in ((first, 900), (first, 1000), (second, 20), (second, 100)):
        save_state(attempt, step, IDENTITY, files_of(step), keep=9)
    claim(store, JOB)
    assert steps_found(store) == [100, 20, 1000, 900]
    state = next(saved_states(store, JOB))
    assert isinstance(state, SavedState)
    assert state.prefix == f"{JOB}/attempts/0002/state/step-000000100"
    assert state.manifest.identity == IDENTITY
    assert StateInfo.of(state.manifest) == StateInfo(step=100, seconds=1.5, world_size=1)
    for name, content in files_of(100).items():
        assert store.read(f"{state.prefix}/{name}") == content


@pytest.mark.parametrize("keep", [1, 3])
def test_only_the_newest_states_are_kept(store: Store, keep: int) -> None:
    attempt = claim(store, JOB)
    saved = [5, 95, 100, 1000, 20_000, 1_000_000]
    for number, step in enumerate(saved, start=1):
        save_state(attempt, step, IDENTITY, files_of(step), keep)
        assert steps_found(store) == saved[:number][-keep:][::-1]
    assert store.folders(f"{attempt.prefix}/state") == [f"step-{step:09d}" for step in saved[-keep:]]


def test_an_attempt_drops_what_it_has_overtaken_and_never_what_overtook_it(store: Store) -> None:
    old, new = claim(store, JOB), claim(store, JOB)
    for step in (100, 200):
        save_state(old, step, IDENTITY, files_of(step), keep=2)
    store.write(f"{old.state_prefix(250)}/model.safetensors", b"its writer was killed")
    save_state(new, 210, IDENTITY, files_of(210), keep=2)
    assert steps_found(store) == [210, 200]
    assert store.folders(f"{old.prefix}/state") == ["step-000000200"]
    save_state(new, 220, IDENTITY, files_of(220), keep=2)
    assert steps_found(store) == [220, 210]
    # The old one, partitioned all the while, comes back.
    store.write(f"{new.state_prefix(230)}/model.safetensors", b"being written")
    save_state(old, 300, IDENTITY, files_of(300), keep=1)
    assert steps_found(store) == [220, 210, 300]
    assert "step-000000230" in store.folders(f"{new.prefix}/state")
    new.drop_states(keep=2)
    assert "step-000000230" in store.folders(f"{new.prefix}/state"), "an attempt's own newest may be half written"


@pytest.mark.parametrize("damage", ["manifest altered", "file cut short", "file gone"])
def test_damage_yields_the_error_and_then_the_state_before(store: Store, tmp_path: Path, damage: str) -> None:
    attempt = claim(store, JOB)
    for step in (100, 200):
        save_state(attempt, step, IDENTITY, files_of(step), keep=2)
    name = "_MANIFEST.json" if damage == "manifest altered" else "rank-0/optimizer"
    path = tmp_path / "run" / attempt.state_prefix(200) / name
    if damage == "manifest altered":
        flip_bit(path, position=10)
    elif damage == "file cut short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    assert steps_found(store) == [f"0001/state/step-000000200/{name}", 100]


def is_intact(store: Store, state: SavedState | CorruptArtifact) -> bool:
    if isinstance(state, CorruptArtifact):
        return False
    return all(
        record == FileRecord.of(store.read(f"{state.prefix}/{name}")) for name, record in state.manifest.files.items()
    )


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("damage", ["flipped", "cut short", "manifest"])
def test_a_sound_state_is_there_at_every_moment_after_the_first(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, every: int, keep: int
) -> None:
    """A disk may damage each state but the first, or each second or third: nothing sound is given up for it."""
    write, delete, damaging = Store.write, Store.delete_one, False

    def damaged(self: Store, key: str, data: bytes) -> None:
        write(self, key, data)
        path = tmp_path / "run" / key
        if damaging and key.endswith("_MANIFEST.json" if damage == "manifest" else "optimizer"):
            path.write_bytes(path.read_bytes()[:-1]) if damage == "cut short" else flip_bit(path, position=3)

    def watched(self: Store, key: str) -> None:
        delete(self, key)
        assert any(is_intact(store, state) for state in saved_states(store, JOB))

    monkeypatch.setattr(Store, "write", damaged)
    monkeypatch.setattr(Store, "delete_one", watched)
    for number in (1, 2):  # the second goes on from what the first one left
        attempt = claim(store, JOB)
        for step in range(1, 10):
            damaging = (number, step) != (1, 1) and step % every == 0
            save_state(attempt, 100 * number + step, IDENTITY, files_of(step), keep)
            states = list(saved_states(store, JOB))
            sound = [state for state in states if is_intact(store, state)]
            assert sound and len(states) <= 2 * keep
            if not damaging:
                assert sound[0].step == 100 * number + step


def test_a_state_without_its_manifest_was_never_finished(store: Store, tmp_path: Path) -> None:
    first, second = claim(store, JOB), claim(store, JOB)
    save_state(first, 100, IDENTITY, files_of(100), keep=2)
    save_state(second, 300, IDENTITY, files_of(300), keep=2)
    (tmp_path / "run" / second.state_prefix(300) / "_MANIFEST.json").unlink()
    assert steps_found(store) == [100]


def test_the_first_reason_counts(store: Store) -> None:
    """A rank that fails takes the others along, whose connections to it end."""
    attempt = claim(store, JOB)
    assert attempt.failure() is None
    note = {"error": "no memory", "kind": "OutOfMemory", "final": False}
    attempt.fail(note)
    attempt.fail({"error": "connection reset by peer", "kind": "RuntimeError", "final": False})
    assert attempt.failure() == note


def test_a_claim_that_cannot_be_read_says_nothing(store: Store) -> None:
    """As a full disk leaves it, or a kill between two calls; its number is taken all the same."""
    assert claim(store, JOB, {"most_rows": 4}).claim()["most_rows"] == 4
    for number, content in ((2, b""), (3, b"{"), (4, b"[1]")):
        store.write(f"{JOB}/attempts/{number:04d}/CLAIM", content)
        assert Attempt(store, JOB, number).claim() == {}
    (Path(store.url) / JOB / "attempts/0005").mkdir()
    assert claim(store, JOB).number == 6


def test_the_weights_of_the_furthest_steps_are_kept(store: Store) -> None:
    """Whichever attempt published them: an older one may have ended the job."""
    first, second, third = (claim(store, JOB) for _ in range(3))
    for attempt, steps in ((first, (100, 200, 1000)), (second, (200, 300, 1000)), (third, (50,))):
        for step in steps:
            publish_weights(attempt, step, IDENTITY, {"ema.safetensors": b"x"})
    second.drop_weights(2)
    kept = [store.folders(f"{attempt.prefix}/weights") for attempt in (first, second, third)]
    assert kept == [["step-000001000"], ["step-000000300", "step-000001000"], ["step-000000050"]]
    second.drop_weights(2)
    assert kept == [store.folders(f"{attempt.prefix}/weights") for attempt in (first, second, third)]


def test_a_half_written_file_of_a_killed_writer_goes_with_its_folder(store: Store) -> None:
    """On a local disk it has no name that a listing shows."""
    old, new = claim(store, JOB), claim(store, JOB)
    for prefix in (old.state_prefix(100), old.weights_prefix(100)):
        folder = Path(store.url) / prefix
        folder.mkdir(parents=True)
        (folder / f"{UNFINISHED}7").write_bytes(b"half")
        assert not store.sizes(prefix)
    save_state(new, 110, IDENTITY, files_of(110), keep=1)
    publish_weights(new, 110, IDENTITY, {"ema.safetensors": b"x"})
    new.drop_weights(1)
    assert store.folders(f"{old.prefix}/state") == store.folders(f"{old.prefix}/weights") == []


def test_a_saved_state_costs_no_more_after_hundreds_of_attempts(requests: Counter[str]) -> None:
    """In a bucket, whose listings are paid for."""
    at = Store("memory:///")
    asked = []
    for many in (2, 200, 400):
        while (attempt := claim(at, JOB)).number < many:
            attempt.beat({"step": 1})
        save_state(attempt, 10, IDENTITY, files_of(10), keep=2)
        publish_weights(attempt, 10, IDENTITY, {"ema.safetensors": b"x"})
        requests.clear()
        save_state(attempt, 20, IDENTITY, files_of(20), keep=2)
        publish_weights(attempt, 20, IDENTITY, {"ema.safetensors": b"x"})
        attempt.drop_weights(2)
        asked.append((requests["list"], requests["get"], requests["head"]))
    assert all(heads == 0 for *_, heads in asked)
    assert asked[1] == asked[2] and asked[2][0] <= 3
