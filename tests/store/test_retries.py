"""An object store that misbehaves for a while is asked again: nothing is lost, made twice, or taken for another's."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.errors import RunError, StorageError
from ddm_ray.jobs.attempts import claim, claimed
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.store.retries import LONG_RETRIES, NO_RETRIES, SHORT_RETRIES, RetryPolicy
from ddm_ray.store.store import Store
from tests.data.s3 import BUCKET, s3_server
from tests.s3_wire import Fault, Request, Wire, wire

pytestmark = pytest.mark.contract

JOB = Artifact("experts/000")
HASTY = {"first_pause": 0.01, "longest_pause": 0.05, "longest_denied": 0.15}
LONG = RetryPolicy(600, denials=True, **HASTY)
BRIEF = RetryPolicy(0.5, **HASTY)
MET = 6  # more than obstore repeats by itself
PASSING = [Fault.DROPPED, Fault.LOST, Fault.UNAVAILABLE, Fault.BROKEN, Fault.DENIED]
numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as url:
        yield url


@pytest.fixture
def through(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """The way to the server, which the environment leads through."""
    with wire(server) as opened:
        monkeypatch.setenv("AWS_ENDPOINT_URL", opened.url)
        yield opened


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/run-{next(numbers)}"


def first(times: int, fault: Fault, pattern: str = "") -> Callable[[Request], Fault | None]:
    """The rule that so many requests of a pattern meet a fault."""
    met = count()
    return lambda request: fault if request.matches(pattern) and next(met) < times else None


@pytest.mark.parametrize("fault", PASSING)
def test_every_request_outlives_trouble(through: Wire, url: str, fault: Fault, tmp_path: Path) -> None:
    store, content = Store(url, LONG), os.urandom(6 << 20)

    def troubled(request: Callable[[], object]) -> object:
        through.rule = first(MET, fault)
        answer = request()
        assert len(through.refused()) >= MET
        through.requests.clear()
        return answer

    troubled(lambda: store.write("a/small", b"small"))
    troubled(lambda: store.write_stream("a/streamed", lambda: iter([content[:7], content[7:]])))
    assert troubled(lambda: store.create("a/created", b"first")) is True
    assert troubled(lambda: store.create("a/created", b"second")) is False
    assert troubled(lambda: store.read("a/created")) == b"first"
    assert troubled(lambda: store.read("a/streamed")) == content
    troubled(lambda: store.fetch("a/streamed", tmp_path / "fetched"))
    assert (tmp_path / "fetched").read_bytes() == content
    assert troubled(lambda: store.exists("a/small")) is True
    assert troubled(lambda: store.exists("a/nothing")) is False
    assert troubled(lambda: store.sizes("a")) == {"created": 5, "small": 5, "streamed": len(content)}
    assert troubled(lambda: store.folders("")) == ["a"]
    troubled(lambda: store.delete("a"))
    assert store.sizes("a") == {}


def test_a_store_that_hangs_is_asked_again(through: Wire, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "200ms")
    store = Store(url, LONG)
    through.rule = lambda _: Fault.HANGS
    with pytest.raises(StorageError, match=r"\(no answer in time\)$"):
        Store(url, BRIEF).create("a", b"first")
    through.rule = first(2, Fault.HANGS)
    assert store.create("a", b"first")
    through.rule = first(2, Fault.HANGS)
    assert store.read("a") == b"first"


@pytest.mark.parametrize("fault", [*PASSING, Fault.CONFLICT])
def test_no_number_is_lost_by_a_claim_in_trouble(through: Wire, url: str, fault: Fault) -> None:
    store = Store(url, LONG)
    through.rule = first(MET, fault, "^PUT ")
    assert claim(store, JOB).number == 1
    through.rule = first(MET, fault, "^PUT ")
    assert claim(store, JOB).number == 2
    assert claimed(store, JOB) == [1, 2]


def test_what_a_rival_created_is_the_rivals(
    server: str, through: Wire, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Store(url, LONG)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    theirs = Store(url, LONG)

    once = first(1, Fault.BROKEN, "^PUT ")

    def rival_is_first(request: Request) -> Fault | None:
        if fault := once(request):
            theirs.write("taken", b"theirs")
        return fault

    through.rule = rival_is_first
    assert not mine.create("taken", b"mine")
    assert len(through.refused()) == 1
    assert mine.read("taken") == b"theirs"
    assert not mine.create("taken", b"theirs"), "no answer was lost: the same bytes aren't mine"


def test_a_conflict_without_an_object_has_an_end(through: Wire, url: str) -> None:
    through.rule = lambda request: Fault.CONFLICT if request.conditional else None
    with pytest.raises(StorageError, match=f"^{url}/a: storage answers that it exists, and has no such object$"):
        Store(url, BRIEF).create("a", b"mine")
    assert len(through.requests) < 2 * BRIEF.seconds / (BRIEF.first_pause / 2)
    with pytest.raises(StorageError, match=f"^{url}/{JOB}/attempts/0001/CLAIM: storage answers that it exists"):
        claim(Store(url, BRIEF), JOB)


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.DROPPED])
def test_a_run_that_cant_be_asked_for_is_one_for_all_that_is_known(
    through: Wire, url: str, fault: Fault, capsys: pytest.CaptureFixture[str]
) -> None:
    Run.create(url, load_recipe("tiny"))
    through.rule = lambda _: fault
    with pytest.raises(StorageError, match=rf"^{url}/run.json: storage doesn't answer: [^\n]*$") as failure:
        Run.open(url, BRIEF)
    assert "Debug" not in str(failure.value)
    with pytest.raises(StorageError, match="storage doesn't answer"):
        Run.open(url, BRIEF)
    capsys.readouterr()
    through.rule = first(20, fault)
    assert Run.open(url, LONG).config.name == "tiny"
    assert f"warning: {url}: storage doesn't answer: " in capsys.readouterr().err


def test_an_outage_is_told_once_and_its_end(through: Wire, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(url, LONG)
    through.rule = first(20, Fault.UNAVAILABLE)
    store.write("a", b"")
    store.write("b", b"")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"warning: {url}: storage doesn't answer: ")
    assert lines[1] == f"{url}: storage answers again"


def test_nobody_waits_for_a_denial_who_waits_for_an_answer(through: Wire, url: str) -> None:
    through.rule = lambda _: Fault.DENIED
    for ask in (lambda store: store.read("a"), lambda store: store.sizes("a"), lambda store: store.create("a", b"")):
        through.requests.clear()
        with pytest.raises(StorageError, match="storage denies it"):
            ask(Store(url, SHORT_RETRIES))
        assert len(through.requests) == 1


@pytest.mark.parametrize("fault", [Fault.DENIED, Fault.KEYS_DENIED])
def test_nobody_waits_for_leave_to_delete(through: Wire, url: str, fault: Fault) -> None:
    store = Store(url, SHORT_RETRIES)
    store.write("a", b"")
    through.rule = lambda request: fault if request.matches("delete") else None
    with pytest.raises(StorageError, match=rf"^{url}/a: storage denies it: .*AccessDenied"):
        store.delete_one("a")
    assert len(through.refused()) == 1
    assert store.exists("a")


def test_a_denial_is_waited_for_as_long_as_it_may_pass(through: Wire, url: str) -> None:
    """By a long policy: for a moment at first, for long once anything was allowed. A command tried again may too."""
    eager = replace(LONG, first_denials=0.1)
    through.rule = lambda _: Fault.DENIED
    for retry_policy in (eager, SHORT_RETRIES):
        with pytest.raises(StorageError, match="storage denies it") as caught:
            Store(url, retry_policy).read("a")
        assert not caught.value.passes
    through.rule = lambda _: None
    store, prompt = Store(url, eager), Store(url, SHORT_RETRIES)
    assert not store.exists("a") and not prompt.exists("a")
    began = time.monotonic()
    through.rule = lambda request: Fault.DENIED if request.at < began + 5 * eager.first_denials else None
    with pytest.raises(StorageError) as caught:
        prompt.read("a")
    assert caught.value.passes
    store.write("a", b"")
    through.rule = lambda _: Fault.UNAVAILABLE
    with pytest.raises(StorageError) as caught:
        Store(url, BRIEF).read("a")
    assert caught.value.passes


def test_who_tries_once_makes_one_request(through: Wire, url: str) -> None:
    through.rule = lambda _: Fault.UNAVAILABLE
    with pytest.raises(StorageError):
        Store(url, NO_RETRIES).delete_one("a")
    assert len(through.requests) == 1


@pytest.mark.parametrize(("fault", "seconds"), [(Fault.UNAVAILABLE, 1.0), (Fault.DENIED, 5.0)])
def test_a_refused_request_is_made_once_in_so_many_seconds(
    through: Wire, url: str, fault: Fault, seconds: float
) -> None:
    scale = 100
    names = ("first_pause", "longest_pause", "longest_denied")
    store = Store(url, RetryPolicy(2.0, denials=True, **{name: getattr(LONG_RETRIES, name) / scale for name in names}))
    store.write("a", b"admitted")
    through.rule = lambda _: fault
    before, began = len(through.requests), time.monotonic()
    with pytest.raises(StorageError):
        store.read("a")
    made = len(through.requests) - before
    assert made > 10
    assert made < scale * (time.monotonic() - began) / seconds


def test_a_store_without_conditional_writes_is_refused_by_name(through: Wire, url: str) -> None:
    through.rule = lambda _: Fault.UNCONDITIONAL
    ignores = f"^{url}: this storage ignores If-None-Match.*; choose one that knows"
    with pytest.raises(StorageError, match=ignores) as caught:
        Run.create(url, load_recipe("tiny"))
    assert not caught.value.passes
    assert len(through.requests) <= 3
    assert Store(url).sizes("") == {}


def test_beginning_a_run_in_no_bucket(through: Wire) -> None:
    with pytest.raises(RunError, match=r"^s3://nowhere/run: there is no such bucket"):
        Run.create("s3://nowhere/run", load_recipe("tiny"))
