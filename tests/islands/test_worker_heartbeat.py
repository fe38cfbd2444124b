"""WorkerState: what a worker keeps on storage, read back; and notes that no honest worker writes."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.errors import ConfigError
from ddm_ray.islands.worker_heartbeat import WorkerHeartbeat, WorkerState, last_speed, read_workers
from ddm_ray.store.store import Store
from tests.conftest import wait_for

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
HUGE = b'{"speed": 1%s}' % (b"0" * 400)
FIELDS = ("beat", "lease_seconds", "holds", "waits", "speed", "ended", "host", "job")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_a_worker_is_read_as_it_keeps_itself(store: Store) -> None:
    with WorkerHeartbeat(store, "north", job="raysubmit_7", speed=None) as heartbeat:
        heartbeat.update(holds="experts/001", speed=2e9)
        (read,) = read_workers(store)
        assert read == heartbeat.state
        assert (read.id, read.island, read.number) == ("north/0001", "north", 1)
        assert (read.holds, read.speed, read.lease_seconds) == ("experts/001", 2e9, 60.0)
        assert not read.ended
        heartbeat.update(speed=-5.0)  # as another's heartbeat on storage may say
        assert heartbeat.state.speed is None
        heartbeat.update(speed=2e9)
    (read,) = read_workers(store)
    assert read.ended and read.holds == "" and last_speed(store, "north") == 2e9
    assert last_speed(store, "south") is None


def test_it_beats_while_its_process_lives(store: Store) -> None:
    with WorkerHeartbeat(store, "north", 0.3):
        (before,) = read_workers(store)
        wait_for(lambda: (read_workers(store)[0].beat or 0) > (before.beat or 0) + 2, 10)


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 64, "é"])
def test_names_that_no_island_has(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        WorkerHeartbeat(store, name)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON) | JSON)
def test_whatever_a_note_says_is_read_by_type(fields: object) -> None:
    store = Store("memory:///")
    store.write("islands/north/workers/0001/PRESENCE", json.dumps(fields).encode())
    read = WorkerState.read(store, "north/0001")
    assert read.beat is None or isinstance(read.beat, int)
    assert 0 < read.lease_seconds <= 600
    assert read.speed is None or 0 < read.speed < float("inf")
    assert all(len(text) <= 200 and text.isprintable() for text in (read.holds, read.waits, read.host, read.job))


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"speed": 1%s}' % (b"0" * 400), b"[" * 100_000, b"\xff", b"x" * 200_000, b"[]", b"7"]
)
def test_a_damaged_note_is_that_of_a_worker_of_whom_nothing_is_known(store: Store, data: bytes) -> None:
    store.write("islands/north/workers/0001/PRESENCE", data)
    assert read_workers(store) == [WorkerState(id="north/0001")]


def test_other_files_are_no_workers(store: Store) -> None:
    for key in ("north/DRAIN", "north/workers/x/PRESENCE", "no rth/workers/0001/PRESENCE", "north/workers/0001/CLAIM"):
        store.write(f"islands/{key}", json.dumps({"beat": 1}).encode())
    assert read_workers(store) == []


@pytest.mark.parametrize("worker", ["../../etc/0001", "north", "north/x", "a/b/0001"])
def test_what_is_no_id_isn_t_looked_for(store: Store, worker: str) -> None:
    with pytest.raises((ValueError, ConfigError)):
        WorkerState.read(store, worker)
