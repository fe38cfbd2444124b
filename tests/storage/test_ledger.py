"""The ledger: what each process of an island counts of itself, and the sum that anybody can make of it."""

import json
import pickle
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.storage import ledger
from ddm_ray.storage.ledger import Account, read_ledger
from ddm_ray.storage.store import Store
from ddm_ray.storage.store_meter import Counted, StoreMeter, meter_of
from tests.conftest import wait_for
from tests.random_run import make_data


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run"))


def test_a_store_that_is_sent_away_is_counted_where_it_is(store: Store) -> None:
    sent = pickle.loads(pickle.dumps(store))
    before = meter_of(store.url).counted
    sent.write("a", b"12345")
    assert (meter_of(store.url).counted - before).written == 5


def account(store: Store, key: str) -> dict[str, object]:
    fields: dict[str, object] = json.loads(store.read(f"ledger/{key}"))
    return fields


def test_what_passes_is_counted_where_it_passes(store: Store, tmp_path: Path) -> None:
    before = meter_of(store.url).counted
    store.write("a", b"12345")
    store.write_stream("b", lambda: [b"123", b"4567"])
    assert store.create("c", b"1") and not store.create("c", b"22")
    assert store.read("a") == b"12345"
    assert Store(store.url).fetch("b", tmp_path / "copy")  # another one of the same place
    assert store.exists("a") and not store.exists("nothing")
    with pytest.raises(FileNotFoundError):
        store.read("nothing")
    store.delete_one("a")
    counted = meter_of(store.url).counted - before
    assert (counted.read, counted.written) == (5 + 7, 5 + 7 + 1 + 2)
    assert counted.requests == {"PUT": 4, "GET": 3, "HEAD": 2, "POST": 1}


def test_an_upload_in_parts_is_many_requests() -> None:
    meter = StoreMeter("")
    meter.writes(12, part=5)
    meter.lists(["a"] * 1001)
    assert meter.counted.requests == {"PUT": 3, "POST": 2, "LIST": 2}


def test_accounts_of_one_process_follow_each_other(store: Store) -> None:
    """Each counts from where the last one ended, so that nothing is counted twice or not at all."""
    with Account(store, "north", 1) as first:
        first.name = "first"
        store.write("a", b"1" * 1000)
    between = time.monotonic()
    store.write("b", b"1" * 500)
    with Account(store, "north", 1, artifact="router") as second:
        second.name = "second"
        store.write("c", b"1" * 200)
    took = time.monotonic() - between
    one, two = (account(store, f"north/{name}") for name in ("first", "second"))
    assert one["written"] == 1000 and one["ended"] is True
    # Its own last write comes to the next one's account.
    assert two["written"] == 700 + len(store.read("ledger/north/first")) and two["artifact"] == "router"
    assert two["seconds"] == pytest.approx(took, abs=0.5)
    (north,), unread = read_ledger(store)
    assert (north.processes, north.open, unread) == (2, 0, 0)
    assert north.counted.written == 1700 + len(store.read("ledger/north/first"))
    assert north.worker_hours == pytest.approx((one["seconds"] + two["seconds"]) / 3600)  # type: ignore[operator]


def test_the_first_account_counts_from_the_processs_start(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_settled", ledger._Settled())
    with Account(store, "", 1) as mine:
        mine.name = "mine"
    life = time.time() - psutil.Process().create_time()
    assert account(store, "unnamed/mine")["seconds"] == pytest.approx(life, abs=1.5)  # psutil knows it to a second


def test_an_account_is_written_now_and_then(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "WRITE_SECONDS", 0.02)
    with Account(store, "north", 0) as mine:
        mine.name = "driver"
        wait_for(lambda: store.exists("ledger/north/driver"), 20)
        (north,), _ = read_ledger(store)
        assert (north.open, north.worker_hours) == (1, 0.0)
    assert read_ledger(store)[0][0].open == 0


def test_accounts_of_others_are_read_with_care(store: Store) -> None:
    sound = {"read": 3, "written": 2, "workers": 1, "seconds": 7200, "requests": {"GET": 1, "?": 5}, "ended": True}
    broken = [b"", b"[]", b"{}", b"[" * 10_000, *(json.dumps({**sound, **bad}).encode() for bad in (
        {"read": "3"}, {"written": -1}, {"workers": 1e3}, {"seconds": "long"}, {"requests": [1]}, {"read": 10**30},
    ))]  # fmt: skip
    for number, data in enumerate([*broken, json.dumps(sound).encode()]):
        store.write(f"ledger/north/{number}", data)
    (north,), unread = read_ledger(store)
    assert unread == len(broken)
    assert north.counted == Counted(3, 2, {"GET": 1, "HEAD": 0, "LIST": 0, "PUT": 0, "POST": 0})
    assert north.worker_hours == 2.0


def test_storage_that_refuses_stops_nobody(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert store.local
    store.local.mkdir()
    (store.local / "ledger").write_text("a file where a folder is to be")
    with Account(store, "north", 1):
        pass
    assert capsys.readouterr().err.count("the ledger lacks this process") == 1


def test_the_command_sums_it_up(tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), num_rows=60)
    fields = {"read": 10**6, "written": 3 * 10**6, "requests": {"PUT": 4}, "ended": True}
    for rank in range(2):
        life = {"seconds": 5400.0, "workers": 1}
        run.store.write(f"ledger/north/{rank}", json.dumps({**fields, **life}).encode())
    islands = tmp_path / "islands.yaml"
    islands.write_text("islands: {north: {workers: 2, price_per_hour: 30}}")
    arguments = ["ledger", run.url, "--islands", str(islands)]
    done = CliRunner().invoke(cli.main, [*arguments, "--json"])
    (north,) = json.loads(done.stdout)["islands"].values()
    assert north["worker_hours"] == 3.0 and north["price"] == pytest.approx(45.0)
    assert north["counted"]["written"] == 6 * 10**6
    shown = CliRunner().invoke(cli.main, arguments).output
    assert all(text in shown for text in ("north", "3.000", "6.000 MB", "45.00"))
