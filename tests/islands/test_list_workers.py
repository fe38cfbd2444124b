"""Roll call again and again: islands as an observer's table shows them, who is silent, what that asks of storage."""

from collections import Counter

import pytest

from ddm_ray.islands.list_workers import WorkerTable
from ddm_ray.islands.worker_heartbeat import WorkerHeartbeat
from ddm_ray.store.store import Store
from tests.run.conftest import requests

__all__ = ["requests"]


@pytest.fixture
def store() -> Store:
    return Store("memory:///")


class Worker(WorkerHeartbeat):
    """A worker that beats when it is told to."""

    def beat(self) -> None:
        self._write()


def test_an_island_is_shown_by_what_it_does_until_it_leaves(store: Store) -> None:
    calls = WorkerTable(store, 0.0)
    assert calls.rows(0.0) == []
    north, south = Worker(store, "north", holds="experts/001", speed=2e9), Worker(store, "south")
    for each in (north, south):
        each.beat()
    (first, doing, alarm), second = calls.rows(1.0)
    assert (first, alarm) == ("north", False)
    assert doing.startswith("trains experts/001, 2e+09 FLOP/s (worker 1 on ")
    assert second[:2] == ("south", second[1]) and second[1].startswith("waits: starting (worker 1 on ")
    other = Worker(store, "north", waits="worker north/0001 of this island is at work")
    other.beat()
    assert calls.rows(2.0)[0][1] == f"{doing}, 1 more stands by"
    north.update(ended=True, holds="")
    assert calls.rows(3.0)[0][1].startswith("waits: worker north/0001 of this island is at work (worker 2 on ")
    other.update(ended=True)
    assert calls.rows(4.0)[0] == ("north", "has left", False)
    assert [row[0] for row in WorkerTable(store, 0.0).rows(5.0)] == ["south"], "who had left before is no news"


def test_a_worker_is_silent_once_its_beat_has_stood_still(store: Store) -> None:
    calls, slow, dead = WorkerTable(store, 15.0), Worker(store, "slow", 180.0), Worker(store, "dead", holds="router")
    for now in range(0, 600, 15):
        if now % 60 == 0:
            slow.beat()
        if now <= 30:
            dead.beat()
        (_, text, silent), (_, doing, alarm) = calls.rows(float(now))
        assert not alarm and doing.startswith("waits: starting")
        assert silent == (now > 90)
    assert text.startswith("no sign of life for 555 s, trains router (worker 1 on ")
    second = Worker(store, "dead", holds="router")
    second.beat()
    assert calls.rows(600.0)[0][1].startswith("trains router (worker 2 on ") and not calls.rows(600.0)[0][2]


def test_a_look_each_15_seconds_lists_and_reads_each_minute(store: Store, requests: Counter[str]) -> None:
    """Those who have ended are read once."""
    for number in range(8):
        Worker(store, f"island-{number}").beat()
        Worker(store, f"island-{number}").update(ended=True)
    calls = WorkerTable(store, 60.0)
    calls.rows(0.0)
    requests.clear()
    for now in range(15, 615, 15):
        assert len(calls.rows(float(now))) == 8
    assert requests == {"list": 10, "get": 80}
