"""Whatever one island writes ends no look at the run, hides nobody else's work, and tells a terminal nothing."""

import json
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest

from ddm_ray.cli import main
from ddm_ray.errors import DDMError
from ddm_ray.islands.list_workers import WorkerTable
from ddm_ray.islands.run_view import RunObserver
from ddm_ray.islands.worker_heartbeat import WorkerState
from ddm_ray.jobs import observer
from ddm_ray.jobs.attempts import claim, claimed, saved_states
from ddm_ray.jobs.status import Status
from ddm_ray.run.graph import ROUTER
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import mixture_info, sampling_settings
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.store.checksummed import RECORD_BYTES
from ddm_ray.watch.events import Events
from ddm_ray.watch.gauges import Gauges
from tests.conftest import BIN
from tests.jobs.hostile_island import CONTROLS, ISLAND, VICTIM, make_hostile_run, mutate
from tests.store_meter import StoreMeter

pytestmark = pytest.mark.contract

FEW, MANY = 80, 10_000
SECONDS, RSS_BYTES = 5.0, 300 * 2**20
# What no text of others may hold once it is printed; the command's own colours are taken out before.
NOT_PRINTED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
OWN_STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Site:
    """The run, and copies of what the island may write, to begin anew with."""

    def __init__(self, root: Path):
        self.run = make_hostile_run(root / "run")
        self._written = {folder: root / "kept" / folder for folder in (VICTIM, ISLAND)}
        for folder, kept in self._written.items():
            shutil.copytree(Path(self.run.url) / folder, kept)

    def restore(self) -> None:
        """Put back what the island had written."""
        for folder, kept in self._written.items():
            place = Path(self.run.url) / folder
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            elif place.is_symlink() or place.exists():
                place.unlink()
            shutil.copytree(kept, place, copy_function=shutil.copyfile)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(autouse=True)
def surveyed(monkeypatch: pytest.MonkeyPatch) -> list[Status]:
    """The statuses that a command has looked at last. Its clock is moved by sleepers alone."""
    look, now, statuses = observer.survey_once, [0.0], list[Status]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def survey_once(run: Run) -> list[Status]:
        statuses[:] = look(run, lambda: now[0], sleep)
        return statuses

    monkeypatch.setattr(observer, "survey_once", survey_once)
    return statuses


def looked_on(run: Run, statuses: list[Status], verb: str) -> dict[str, str]:
    """The lines of all artifacts, after all that looks at a run without doing anything has looked."""
    commanded("status", run.url)
    printed = commanded("status", run.url, "--long")[1:] if verb == "status" else commanded("watch", run.url, "--once")
    lines = {text.split(maxsplit=1)[0]: text.strip() for text in printed if not text.startswith("warning: ")}
    assert [*lines] == [status.artifact for status in statuses]
    events = Events(run.url, 1.0).seen(statuses)
    gauges, registry = Gauges(run.url), CollectorRegistry()
    gauges.update(statuses)
    registry.register(gauges)
    generate_latest(registry)
    board = RunObserver(run, [*run.experts, ROUTER], lambda artifact: 1e3)
    view = board.look(WorkerState(id="me/0001", beat=1))
    rows = WorkerTable(run.store, 0.0).rows(0.0)
    claimed(run.store, VICTIM)
    list(saved_states(run.store, VICTIM))
    assert {job.artifact for job in view.jobs} <= {each.artifact for each in view.statuses}
    for text in [*printed, *map(str, rows), *(event.text for event in events), *(job.obstacle for job in view.jobs)]:
        assert not NOT_PRINTED.search(text), text
    return lines


def commanded(*arguments: str) -> list[str]:
    """The lines that a command prints on its output, as a terminal gets them.

    On the error's Python may tell of what other tests have left.
    """
    done = CliRunner().invoke(main, arguments, color=True)
    assert done.exception is None, repr(done.exception)
    text = OWN_STYLE.sub("", done.output)
    assert not NOT_PRINTED.search(text), text
    return OWN_STYLE.sub("", done.stdout).splitlines()


def served(run: Run) -> None:
    """What a server does before it starts; an error of ours is an answer."""

    def ask(what: Callable[[], Any]) -> None:
        text = ""
        try:
            what()
        except DDMError as error:
            text = error.text()
        assert not NOT_PRINTED.search(text), text

    def read_finished() -> None:
        for weights in Versions(run).newest():
            if weights.final:
                manifest = run.require(weights.artifact)
                for name in manifest.files:
                    run.read(weights.artifact, name, manifest)

    ask(read_finished)
    ask(lambda: mixture_info(run))
    ask(lambda: sampling_settings(run))


def test_whatever_an_island_writes(
    site: Site, surveyed: list[Status], every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = looked_on(site.run, surveyed, "status")
    uses_it = {each.artifact for each in surveyed if VICTIM in site.run.inputs(each.artifact)}
    slowest, at_first, meter = 0.0, _peak(), StoreMeter(monkeypatch)
    for seed in range(MANY if every else FEW):
        random = Random(seed)
        changes = [mutate(site.run, random) for _ in range(random.choice((1, 1, 1, 2, 3)))]
        read, began = meter.read, time.thread_time()
        try:
            after = looked_on(site.run, surveyed, ("status", "watch")[seed % 2])
            served(site.run)
            # What another expert was part of was made otherwise.
            spared = {VICTIM, *(uses_it if another(site.run) else ())}
            assert after.keys() == before.keys()
            assert [text for name, text in after.items() if name not in spared and text != before[name]] == []
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(changes)}")
            raise
        finally:
            site.restore()
        slowest = max(slowest, time.thread_time() - began)
        assert meter.read - read < RECORD_BYTES, changes
    assert slowest < SECONDS
    assert _peak() - at_first < RSS_BYTES


@pytest.mark.parametrize("arguments", [("status",), ("status", "--long"), ("watch", "--once")])
def test_a_terminal_gets_no_escape(site: Site, arguments: tuple[str, ...]) -> None:
    """Its clipboard, title and screen are nobody else's, and each artifact has one line."""
    verb, *options = arguments
    note = {"error": CONTROLS, "kind": "TrainingError", "final": True, "fix": CONTROLS}
    attempt = claim(site.run.store, VICTIM)
    attempt.beat(
        {"beat": 1, "step": 3, "steps": 9, "host": CONTROLS, "island": CONTROLS, "versions": {"ray": CONTROLS}}
    )
    site.run.store.write(f"{attempt.prefix}/FAILED", json.dumps(note).encode())
    site.run.store.write("eval/a\u202eb/y", b"")
    try:
        text, status = on_a_terminal(str(BIN / "ddm"), verb, site.run.url, *options)
    finally:
        site.restore()
        site.run.store.delete("eval/a\u202eb")
    lines = OWN_STYLE.sub("", text.decode()).split("\r\n")
    assert status == 0 and not any(NOT_PRINTED.search(line) for line in lines)
    if arguments == ("status",):
        return
    row = [line for line in lines if f"{VICTIM} " in line]
    assert len(row) == 1 and "\\x1b" in row[0] and "\\x9b" in row[0]
    names = [line.split()[0] for line in lines[verb == "status" :] if line]
    assert len({*names}) == len(names) >= 6


def on_a_terminal(*command: str) -> tuple[bytes, int]:
    """All that a command writes to its terminal, and its exit status. The terminal can't show what moves."""
    ours, its = os.openpty()
    env = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, close_fds=True, env=env)
    os.close(its)
    written = b""
    with suppress(OSError):  # at its end
        while piece := os.read(ours, 2**16):
            written += piece
    os.close(ours)
    return written, process.wait()


def another(run: Run) -> bool:
    """True if the island has put a manifest there that can be read."""
    with suppress(DDMError):
        return run.manifest(VICTIM) is not None
    return False


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
