"""`ddm watch` as a process, on real storage, with a real webhook and a real scrape."""

import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.islands.list_workers import WorkerTable
from ddm_ray.islands.worker_heartbeat import WorkerHeartbeat
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.job_status import JobStatus
from ddm_ray.jobs.observer import Observer
from ddm_ray.jobs.status import Status, survey
from ddm_ray.run.graph import MONOLITH, ROUTER, STUDENT
from ddm_ray.run.run import Run
from ddm_ray.watch import loop
from ddm_ray.watch.gauges import Gauges, gauge_values
from ddm_ray.watch.live_view import LiveView
from ddm_ray.watch.loop import trained
from tests.conftest import BIN, heed_ctrl_c, wait_for
from tests.jobs.attempts import beat, fail, finish
from tests.random_run import make_data, make_run
from tests.watch.hooks import hook_server

pytestmark = pytest.mark.contract


def start(run: Run, log: Path, *options: str) -> subprocess.Popen[bytes]:
    """`ddm watch` in a process of its own."""
    with log.open("wb") as sink:
        command = [str(BIN / "ddm"), "watch", run.url, "--every", "0.2", *options]
        return subprocess.Popen(command, stdout=sink, stderr=sink, preexec_fn=heed_ctrl_c)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scrape(port: int, run: Run, artifact: str) -> dict[str, float]:
    """The gauges of one artifact, as Prometheus would see them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    labels = re.escape(f'artifact="{artifact}",run="{run.url}"')
    return {name: float(value) for name, value in re.findall(rf"^(\w+)\{{{labels}\}} (\S+)$", text, re.MULTILINE)}


def test_a_run_is_watched_to_its_end(tmp_path: Path) -> None:
    run, log, port = make_data(f"{tmp_path}/run", num_rows=60), tmp_path / "log", free_port()
    first, second = (claim(run.store, artifact) for artifact in run.experts)
    beat(first, 1, 75, mfu=None, heldout_loss=0.25, heldout_error=0.01, heldout_step=60)
    beat(second, 1, 20)
    with hook_server() as hook:
        options = ("--prometheus", str(port), "--webhook", hook.url, "--stalled-after", "1.5")
        watching = start(run, log, *options)
        try:
            wait_for(lambda: hook.events or watching.poll() is not None, 60, log.read_text)
            wait_for(lambda: len(hook.events) == 2, 20, log.read_text)
            assert sorted(hook.events) == [(artifact, "stalled") for artifact in run.experts]
            assert {(body["run"], body["attempt"], body["steps"]) for body in hook.bodies} == {(run.url, 1, 300)}
            known = scrape(port, run, "experts/000")
            assert known.pop("ddm_silent_seconds") > 1
            assert known == {
                "ddm_finished": 0,
                "ddm_failed": 0,
                "ddm_step": 75,
                "ddm_steps": 300,
                "ddm_attempt": 1,
                "ddm_saved_step": 0,
                "ddm_loss": 0.12345,
                "ddm_heldout_loss": 0.25,
                "ddm_grad_norm": 0.5,
                "ddm_learning_rate": 1e-3,
                "ddm_samples_per_second": 200,
                "ddm_world_size": 2,
            }
            assert scrape(port, run, "experts/001")["ddm_mfu"] == 0.41
            assert scrape(port, run, ROUTER) == {"ddm_finished": 0}

            beat(first, 2, 76)
            fail(second, "gradient norm nan", final=True)
            wait_for(lambda: len(hook.events) == 4, 20, log.read_text)
            assert set(hook.events[2:]) == {("experts/000", "resumed"), ("experts/001", "failed")}
            failed = scrape(port, run, "experts/001")
            assert failed == {
                "ddm_finished": 0,
                "ddm_failed": 1,
                "ddm_step": 20,
                "ddm_saved_step": 0,
                "ddm_steps": 300,
                "ddm_attempt": 1,
            }
            # Two experts and the router: the monolith that nobody began isn't waited for.
            for artifact in run.experts:
                finish(run, artifact)
            wait_for(lambda: len(hook.events) == 6, 20, log.read_text)
            assert scrape(port, run, "experts/000")["ddm_finished"] == 1
            assert watching.poll() is None
            finish(run, ROUTER)
            assert watching.wait(20) == 0
        finally:
            watching.kill()
            watching.wait()
        assert sorted(hook.events[4:]) == [(artifact, "finished") for artifact in (*run.experts, ROUTER)]
    printed = log.read_text()
    assert f"all that {run.url} trains is finished" in printed
    assert re.search(r"^experts/000 +25%  step 75/300, loss 0.1235", printed, re.MULTILINE)
    for body in hook.bodies:
        assert body["text"] in printed
    assert "Traceback" not in printed


def test_a_dead_webhook_and_ctrl_c(tmp_path: Path) -> None:
    run, log = make_data(f"{tmp_path}/run", num_rows=60), tmp_path / "log"
    fail(claim(run.store, "experts/001"), "[Errno 28] no space left")
    watching = start(run, log, "--webhook", f"http://127.0.0.1:{free_port()}/secret")
    try:
        wait_for(lambda: "trying again in 1 s" in log.read_text(), 60, log.read_text)
        beat(claim(run.store, "experts/000"), 1, 75)
        wait_for(lambda: "experts/000   25%  step 75/300" in log.read_text(), 20, log.read_text)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130
    finally:
        watching.kill()
        watching.wait()
    printed = log.read_text()
    assert "failed: [Errno 28] no space left, attempt 1; `ddm train" in printed
    assert "Connection refused; dropped: " in printed
    assert "secret" not in printed and "Traceback" not in printed


class View(LiveView):
    """A live view that keeps what it shows: fraction, note and alarm by name."""

    def __init__(self) -> None:
        super().__init__("watching", [], clock=False)
        self.shown: dict[str, tuple[float, str, bool]] = {}

    def show(self, name: str, fraction: float, note: str, alarm: bool = False) -> None:
        self.shown[name] = (fraction, note, alarm)


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> View:
    view = View()
    monkeypatch.setattr(loop, "LiveView", lambda *_, **options: view)
    return view


def watch(run: Run, between: Iterator[None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Watch in this process until the run is trained, and go on with `between` after each look; the warnings."""
    warnings: list[str] = []
    monkeypatch.setattr("time.sleep", lambda _: next(between))
    loop.watch(run, list, str, warnings.append, 1.0, 60.0, islands=WorkerTable(run.store, 0.0).rows)
    return warnings


def test_islands_are_in_the_table_while_they_are_at_work(
    tmp_path: Path, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in the table of a run without any there is no word on them."""
    run = make_data(f"{tmp_path}/run", num_rows=60)
    finish(run, run.experts[0])

    def between() -> Iterator[None]:
        assert not {"north", "south"} & view.shown.keys()
        with WorkerHeartbeat(run.store, "north", holds="experts/001"), WorkerHeartbeat(run.store, "south", waits="all"):
            yield
            for name, doing in (("north", "trains experts/001"), ("south", "waits: all")):
                fraction, text, alarm = view.shown[name]
                assert fraction == pytest.approx(1 / 3) and text.startswith(f"{doing} (worker 1 on ") and not alarm
        yield
        assert view.shown["south"] == (pytest.approx(1 / 3), "has left", False)
        for artifact in (*run.experts[1:], ROUTER):
            finish(run, artifact)
        yield

    assert watch(run, between(), monkeypatch) == []


def test_storage_that_goes_away_is_waited_for(tmp_path: Path, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_data(f"{tmp_path}/run", num_rows=60)
    beat(claim(run.store, "experts/000"), 1, 75)

    def between() -> Iterator[None]:
        folder = Path(run.url)
        folder.rename(tmp_path / "aside")
        folder.symlink_to(folder)  # a loop: nothing below can be asked for
        yield
        yield
        assert view.shown["experts/000"][1].startswith("step 75/300")
        folder.unlink()
        (tmp_path / "aside").rename(folder)
        for artifact in (*run.experts, ROUTER):
            finish(run, artifact)
        yield

    (warning,) = watch(run, between(), monkeypatch)
    assert warning.startswith("storage can't be asked, trying on: ")


def test_a_job_is_silent_for_longer_the_older_the_survey_is(tmp_path: Path) -> None:
    run = make_data(f"{tmp_path}/run", num_rows=60)
    beat(claim(run.store, "experts/000"), 1, 75)
    (begun,) = [each for each in Observer(run, partial(survey, run)).look(0.0) if each.artifact == "experts/000"]
    assert [gauge_values(begun, age)["ddm_silent_seconds"] for age in (0.0, 7.0)] == [0.0, 7.0]


def test_what_is_waited_for(tmp_path: Path) -> None:
    run = make_data(f"{tmp_path}/run", num_rows=60)
    finished = [Status(artifact, "finished") for artifact in (*run.experts, ROUTER)]
    extras = [Status(artifact, "waiting") for artifact in (MONOLITH, STUDENT)]
    assert trained(run, [*finished, *extras])
    in_vain = JobStatus(0, {}, {"error": "no such island"}, None, 0)
    for one, other in (extras, extras[::-1]):
        for state in ("begun", "failed", "damaged"):
            assert not trained(run, [*finished, Status(one.artifact, state), other])  # type: ignore[arg-type]
        launched = Status(one.artifact, "failed", job=in_vain)
        assert trained(run, [*finished, launched, other]), "launched, and never begun"
    for lacking in range(len(finished)):
        others = [Status(status.artifact, "begun") if n == lacking else status for n, status in enumerate(finished)]
        assert not trained(run, [*others, *extras])
    settings = ("partition.method=given",)
    given = make_data(f"{tmp_path}/given", settings=settings, num_rows=60)
    experts = [Status(artifact, "finished") for artifact in given.experts]
    assert trained(given, experts)


def test_gauges_of_a_finished_run(tmp_path: Path) -> None:
    run = make_run(f"{tmp_path}/run", num_rows=60)
    gauges = Gauges(run.url)
    gauges.update(survey(run))
    values = {
        (sample.name, sample.labels["artifact"]): sample.value for gauge in gauges.collect() for sample in gauge.samples
    }
    assert {artifact for name, artifact in values if name == "ddm_finished"} >= {"rows", "partition", MONOLITH}
    assert values["ddm_step", MONOLITH] == values["ddm_steps", MONOLITH] == 300
    assert values["ddm_loss", "experts/001"] == 0.25
    assert not [name for name, _ in values if name in ("ddm_silent_seconds", "ddm_samples_per_second", "ddm_failed")]


@pytest.mark.parametrize("option", ["--every", "--stalled-after"])
def test_times_are_positive(tmp_path: Path, option: str) -> None:
    done = CliRunner().invoke(main, ["watch", str(tmp_path), option, "0"])
    assert done.exit_code == 2
    assert option in done.stderr
