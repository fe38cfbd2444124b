"""Twelve faults, each planted on a real island, are found by name and remedy; where none is, none is found."""

import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.config import load_recipe
from ddm_ray.islands.check import Question, note_of
from ddm_ray.islands.faults import Answer, Fault, faults
from ddm_ray.islands.jobs import JobsAPI
from ddm_ray.islands.needs import ModelNeeds, needs_of
from ddm_ray.islands.nodes import answers_strangers
from ddm_ray.islands.probe import MARK
from ddm_ray.placement import Island as Site
from ddm_ray.placement import TrainPlacement, Workers
from ddm_ray.storage.graph import ROUTER, expert
from ddm_ray.storage.run import Run
from ddm_ray.storage.versions import versions
from tests.conftest import ROOT, Island, ddm, wait_for
from tests.data.s3 import s3_server, upload
from tests.islands.test_jobs_answers import says, served
from tests.random_run import make_data
from tests.s3_wire import Fault as OnTheWire
from tests.s3_wire import Request, Wire, wire

Line = Callable[[str], str]
SLEEP = 4

PLANTED = {
    "API unreachable": r"http://127.0.0.1:1 can't be reached: Connection refused; start its Ray, correct jobs",
    "wrong token": r"refuses this token; name the file that has its token as token_file",
    "open to others": r"answers who gives no token.*; start its Ray with RAY_AUTH_MODE=token",
    "no key": r"/note: storage denies it: .*; start its Ray, on each machine, with a key",
    "storage not shared": r"/elsewhere has nothing of it; put the run where each island sees it",
    "no conditional writes": r"storage ignores If-None-Match there.*; choose one that knows conditional writes",
    "clock off": r"its clock is (8[5-9]|90) s ahead of the one here; set both by a time server",
    "other versions": r"has deepspeed 0\.0\.1, here \d.*; install the same there and here",
    "too few CPUs": r"64 x 1 CPU asked for, its Ray has 4; change workers or resources_per_worker",
    "too little memory": r"has .* GB, the state of one expert takes [\d.]+ GB there; choose more workers",
    "cache disk full": r"has room for .* GB, the rows of one expert are 1,000,000 GB; make room, or name a folder",
    "no ddm": r"ddm: not found.*; install ddm-ray there, and start its Ray with the folder of its commands on PATH",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_data(str(tmp_path_factory.mktemp("checked") / "run"), num_rows=60)


@pytest.fixture(scope="module")
def needs(run: Run) -> list[ModelNeeds]:
    return needs_of(run, [expert(0), ROUTER])


@pytest.fixture(scope="module")
def bucket(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Wire, Wire]]:
    """The run in a bucket, and two ways to it: one that denies everything, one that ignores conditions."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as url, wire(url) as denying, wire(url) as unconditional:
        denying.rule = lambda _: OnTheWire.DENIED
        unconditional.rule = lambda _: OnTheWire.UNCONDITIONAL
        yield Run.open(upload(Path(run.url), "checked")), denying, unconditional


def probing(url: str, *options: str, **environment: str) -> Line:
    """The line that reports without Ray's part, with names in its environment."""
    names = {"PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}", **environment}
    settings = [f"{name}={value}" for name, value in names.items()]

    def line(question: str) -> str:
        command = [sys.executable, "-m", "tests.islands.probing", url, question, *options]
        return f"cd {shlex.quote(str(ROOT))} && " + shlex.join(["env", *settings, *command])

    return line


def asked(run: Run, site: Site, line: Line) -> Answer:
    return Question(run, site, note_of(run), line, threading.Event()).ask()


@pytest.fixture(scope="module")
def north(island: Island) -> Site:
    return Site(name="north", jobs=island.jobs, token_file=str(island.token))


@pytest.fixture(scope="module")
def late_answer(north: Site, run: Run) -> Answer:
    """An answer that shows no fault, of a job that took SLEEP seconds to begin."""
    return asked(run, north, lambda question: f"sleep {SLEEP}; {probing(run.url)(question)}")


@pytest.fixture(scope="module")
def named(
    north: Site,
    late_answer: Answer,
    run: Run,
    needs: list[ModelNeeds],
    bucket: tuple[Run, Wire, Wire],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[Fault]]:
    """The faults of an island for each that was planted; with none planted under the empty name."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "token").write_text("0" * 64)
    (folder / "old" / "deepspeed-0.0.1.dist-info").mkdir(parents=True)
    (folder / "old" / "deepspeed-0.0.1.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.0.1\n")
    in_bucket, denying, unconditional = bucket
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    old = f"{folder}/old:{ROOT}:{os.environ['PYTHONPATH']}"
    large = Run.create(str(folder / "large"), load_recipe("ddm-24b"))

    def planted(name: str, stranger: str) -> list[Fault]:
        site, of, line, wanting = north, run, probing(run.url), needs
        match name:
            case "API unreachable":
                site = north.model_copy(update={"jobs": "http://127.0.0.1:1"})
            case "wrong token":
                site = north.model_copy(update={"token_file": str(folder / "token")})
            case "open to others":
                site = north.model_copy(update={"jobs": stranger})
            case "no key":
                of, line = in_bucket, probing(in_bucket.url, **aws | {"AWS_ENDPOINT_URL": denying.url})
            case "storage not shared":
                line = probing(str(folder / "elsewhere"))
            case "no conditional writes":
                of, line = in_bucket, probing(in_bucket.url, **aws | {"AWS_ENDPOINT_URL": unconditional.url})
            case "clock off":
                line = probing(run.url, "--ahead", "90")
            case "other versions":
                line = probing(run.url, PYTHONPATH=old)
            case "cache disk full":
                of, line = in_bucket, probing(in_bucket.url, "--cache", str(folder), **aws)
                wanting = [replace(needs[0], rows={expert(0): 10**15})]
            case "no ddm":
                line = "PATH=/none; ddm islands probe {}".format
        return faults(asked(of, site, line), site, wanting, versions())

    with served(says(404, "Job none does not exist")) as (stranger, _), ThreadPoolExecutor(4) as pool:
        names = [name for name in PLANTED if name not in ("too few CPUs", "too little memory")]
        listed = dict(zip(names, pool.map(lambda name: planted(name, stranger), names), strict=True))
    crowded = north.model_copy(update={"train": TrainPlacement(workers=Workers(min=64, max=64))})
    return listed | {
        "": faults(late_answer, north, needs, versions()),
        "too few CPUs": faults(late_answer, crowded, needs, versions()),
        "too little memory": faults(late_answer, north, needs_of(large, [expert(0)]), versions()),
    }


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_by_name_and_remedy(named: dict[str, list[Fault]], name: str) -> None:
    others = ["no Jobs API"] if name == "open to others" else []
    assert [fault.name for fault in named[name]] == [name, *others], named[name]
    assert re.search(PLANTED[name], str(named[name][0])), named[name][0]
    assert str(named[name][0]).isprintable()


def test_where_no_fault_was_planted_none_is_found(named: dict[str, list[Fault]], run: Run) -> None:
    assert named[""] == []
    assert {path.name for path in Path(run.url).iterdir()} == {"partition", "rows", "run.json"}


def test_clocks_are_compared_whatever_time_a_job_takes_to_begin(late_answer: Answer) -> None:
    assert late_answer.ahead
    low, high = late_answer.ahead
    assert -SLEEP < low <= 0 <= high < SLEEP


def test_a_report_that_comes_by_the_log_alone_is_of_another_storage(north: Site, run: Run, late_answer: Answer) -> None:
    assert late_answer.stored and late_answer.report
    printed = shlex.quote(MARK + late_answer.report.to_json())
    answer = asked(run, north, lambda _: f"echo {printed}")
    assert answer.report == late_answer.report and not answer.stored
    assert "storage not shared" in [fault.name for fault in faults(answer, north, [], versions())]


def test_a_door_that_knows_no_stranger_is_named_and_the_island_looked_at(north: Site, run: Run) -> None:
    """Who gives no token is led elsewhere, as by a proxy with a page to log in; who gives one is answered by Ray."""

    def door(handler: BaseHTTPRequestHandler) -> None:
        if "Authorization" not in handler.headers:
            says(302, "log in", Location="http://127.0.0.1:1/")(handler)
            return
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0))) or None
        connection = HTTPConnection(str(urlsplit(north.jobs).netloc), timeout=60)
        connection.request(handler.command, handler.path, body, dict(handler.headers))
        answer = connection.getresponse()
        says(answer.status, answer.read().decode())(handler)
        connection.close()

    with served(door) as (url, _):
        site = north.model_copy(update={"jobs": url})
        answer = asked(run, site, probing(run.url))
        assert answer.report and answer.stored
        (fault,) = faults(answer, site, [], versions())
        assert fault.name == "an odd answer" and "isn't refused, it answers 302: log in" in fault.what


def test_storage_that_refuses_one_question_hides_no_other_answer(
    bucket: tuple[Run, Wire, Wire], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, _, _ = bucket
    refused: list[str] = []

    def rule(request: Request) -> OnTheWire | None:
        if request.method == "PUT" and re.search("_check-.*/note", request.path):
            refused.append(request.key)
            return OnTheWire.DENIED
        return None

    with (
        wire(os.environ["AWS_ENDPOINT_URL"]) as denying,
        served(says(401, "Unauthorized")) as (url, _),
    ):
        denying.rule = rule
        monkeypatch.setenv("AWS_ENDPOINT_URL", denying.url)
        islands = {"east": {"jobs": url}, "south": {"jobs": "http://127.0.0.1:1"}}
        (tmp_path / "islands.yaml").write_text(json.dumps({"islands": islands}))
        command = ["islands", "check", run.url, "--islands", str(tmp_path / "islands.yaml")]
        both = CliRunner().invoke(main, command)
        alone = CliRunner().invoke(main, [*command, "--island", "east"])
    assert len(set(refused)) == 2
    east, south = sorted(both.stdout.splitlines())
    assert re.fullmatch("east   storage refuses here: .*/note: storage denies it: .*; mend that, and ask again", east)
    assert south.startswith("south  API unreachable: ")
    assert both.stderr.splitlines()[-1] == "error: 2 of 2 islands can't train this run as they are: see above"
    assert alone.stdout.startswith("east  storage refuses here: ")
    assert "storage denies it" in alone.stderr.splitlines()[-1] and alone.exit_code == 75


def test_a_file_of_islands_is_checked_by_one_command(island: Island, run: Run, tmp_path: Path) -> None:
    """Through Ray itself: its resources, a look at its machine, its own port without a token."""
    north = {"jobs": island.jobs, "token_file": str(island.token), "cache": str(tmp_path)}
    islands = {"north": north, "south": north | {"jobs": "http://127.0.0.1:1"}, "west": {}}
    islands["further"] = {"storage": "s3://lab"}
    (tmp_path / "islands.yaml").write_text(json.dumps({"islands": islands}))
    before = {path: path.stat().st_mtime_ns for path in Path(run.url).rglob("*")}
    command = ("islands", "check", run.url, "--islands", str(tmp_path / "islands.yaml"))
    done = ddm(*command, "--island", "north")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(
        r"north  ok: 4 places for workers, 4 CPUs, [\d.]+ GB of memory, Ray [\d.]+, clock within [\d.]+ s\n",
        done.stdout,
    )
    assert {path: path.stat().st_mtime_ns for path in Path(run.url).rglob("*")} == before
    done = CliRunner().invoke(main, [*command, "--island", "south", "--island", "west", "--island", "further"])
    assert done.exit_code == 1
    beginnings = (
        "further  another storage: ",
        "south    API unreachable: http://127.0.0.1:1 ",
        "west     no Jobs API: ",
    )
    assert all(map(str.startswith, sorted(done.stdout.splitlines()), beginnings)), done.stdout
    assert done.stderr.splitlines()[-1] == "error: 3 of 3 islands can't train this run as they are: see above"


def test_a_ray_that_asks_nobody_for_a_token_is_open(island: Island) -> None:
    assert answers_strangers(island.ray) is False
    assert answers_strangers("127.0.0.1:1") is None
    server = grpc.server(ThreadPoolExecutor(1))
    unary = grpc.unary_unary_rpc_method_handler(lambda *_: b"")
    handler = grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", {"GetAllNodeInfo": unary})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert answers_strangers(f"127.0.0.1:{port}") is True
    finally:
        server.stop(None)


def test_a_probe_that_does_not_end_is_ended(north: Site, run: Run) -> None:
    answer = Question(run, north, note_of(run), "sleep 300; echo {}".format, threading.Event()).ask(seconds=1)
    assert (
        answer.late
        and answer.job
        and [fault.name for fault in faults(answer, north, [], versions())]
        in (
            ["takes no job"],
            ["takes too long"],
        )
    )
    jobs, job = JobsAPI("north", str(north.jobs), north.token_file), answer.job.id

    def ended() -> bool:
        seen = jobs.job(job)
        return seen is not None and seen.status == "STOPPED"

    wait_for(ended, 60)
