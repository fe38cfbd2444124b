"""Eight that claim at once have eight numbers, also where answers are lost or false."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Barrier, Lock
from typing import Any

import pytest

from ddm_ray.jobs.attempts import Attempt, claim, claimed
from ddm_ray.run.graph import Artifact
from ddm_ray.store.retries import LONG_RETRIES
from ddm_ray.store.store import Store
from tests.data.s3 import BUCKET, s3_server
from tests.s3_wire import Fault, Request, Wire, leading_through

pytestmark = pytest.mark.contract

HASTY = replace(LONG_RETRIES, first_pause=0.002, longest_pause=0.02, longest_denied=0.02)
JOB, RIVALS = Artifact("experts/001"), 8
FEW, MANY = 25, 1000
FALSE = (Fault.BELIED, Fault.LOST, Fault.DROPPED, Fault.UNAVAILABLE, Fault.CONFLICT)


@pytest.fixture(autouse=True)
def fierce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has lost a number tries the next one at once."""
    monkeypatch.setattr("ddm_ray.jobs.attempts.RIVAL_SECONDS", 0.002)


def race(stores: list[Store], job: Artifact = JOB) -> list[Attempt]:
    """Claim by each of the stores, all at once."""
    ready = Barrier(len(stores))

    def enter(store: Store) -> Attempt:
        ready.wait()
        return claim(store, job, {"island": str(id(store))})

    with ThreadPoolExecutor(len(stores)) as pool:
        return [*pool.map(enter, stores)]


def rounds(every: bool, few: int = FEW) -> range:
    return range(MANY if every else few)


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A bucket behind a proxy, which takes one request at a time: what has been created is there for the next."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server, leading_through(server) as through:
        lock, forward = Lock(), through._forward

        def forward_alone(*request: Any) -> Any:
            # moto looks whether a key exists, and writes afterwards: no storage that decides between rivals.
            with lock:
                return forward(*request)

        through._forward = forward_alone  # type: ignore[method-assign]
        yield through


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_nobody_shares_a_number(kind: str, tmp_path: Path, every: bool) -> None:
    shared = Store("memory:///")
    for number in rounds(every):
        stores = [Store(str(tmp_path)) if kind == "disk" else shared for _ in range(RIVALS)]
        job = Artifact(f"experts/{number:03d}")
        assert sorted(each.number for each in race(stores, job)) == [*range(1, RIVALS + 1)]
        assert claimed(stores[0], job) == [*range(1, RIVALS + 1)]


def test_nobody_shares_a_number_that_a_false_answer_was_about(wire: Wire, every: bool) -> None:
    """A fault costs a number at most, which nobody has then."""
    for number in rounds(every, few=4):
        random, url = Random(number), f"s3://{BUCKET}/race-{number}"
        since = len(wire.requests)

        def rule(asked: Request, random: Random = random) -> Fault | None:
            return random.choice(FALSE) if asked.method == "PUT" and random.random() < 0.1 else None

        wire.rule = rule
        attempts = race([Store(url, HASTY) for _ in range(RIVALS)])
        wire.rule = lambda _: None
        faults = sum(each.fault is not None for each in wire.requests[since:])
        assert len({each.number for each in attempts}) == RIVALS, number
        for each in attempts:
            assert each.claim(), number
        assert len(claimed(Store(url), JOB)) <= RIVALS + faults, number
