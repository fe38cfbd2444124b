"""Islands of this machine as their user has them: three are brought up, given jobs, robbed of a head, brought down."""

import os
import re
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ddm_ray.cli import main
from ddm_ray.cli.launch import submit_line
from ddm_ray.errors import RayAway, RayError
from ddm_ray.islands import ports
from ddm_ray.islands.conduct import Conductor, IslandJob, submission_id
from ddm_ray.islands.jobs import JobsAPI
from ddm_ray.islands.local_files import IslandFolder
from ddm_ray.islands.processes import read_process
from ddm_ray.placement import Island
from ddm_ray.storage.attempts import Attempt, claimed
from ddm_ray.storage.graph import ROUTER, expert
from tests.conftest import BIN, wait_for
from tests.islands.brought_up import DOWN, THEN, UP, Islands, alive, gcs_server, say
from tests.listeners import ask, is_refused, listeners, services
from tests.processes import command, family
from tests.random_run import make_data
from tests.readme import commands_of, section

RUN = "/nowhere/run7"


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Islands]:
    """The README's three islands, below a home folder of their own."""
    home = tmp_path_factory.mktemp("home")
    folder = home / ".ddm" / "islands"
    try:
        yield Islands(folder, say(UP, home))
    finally:
        records = IslandFolder(folder).islands()
        say(DOWN, home)
        assert not alive(records, [record.temp for record in records])


def test_each_is_ready_and_closed_to_others(brought: Islands) -> None:
    assert [*brought.islands] == ["local-0", "local-1", "local-2"]
    assert f"next: ddm launch RUN --islands {brought.folder}/islands.yaml" in brought.printed
    tokens = []
    for name, island in brought.islands.items():
        assert re.search(rf"{name} is ready, with \d+ CPUs?: {re.escape(island.jobs or '')}", brought.printed)
        path = Path(island.token_file or "")
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (brought.folder, path.parent, path)]
        assert modes == [0o700, 0o700, 0o600]
        tokens.append(path.read_text())
    assert len(set(tokens)) == 3 and all(len(token) == 64 for token in tokens)
    text = (brought.folder / "islands.yaml").read_text() + brought.printed
    text += "".join(command(pid) for record in brought.records for pid in family(record.pid))
    assert not [token for token in tokens if token in text]
    for record in brought.records:
        assert stat.S_IMODE(Path(record.temp).stat().st_mode) == 0o700
        listened = {port for _, port in listeners(family(record.pid))}
        assert {record.base, record.base + 1} <= listened <= set(range(record.base, record.base + ports.SIZE))


def test_a_stranger_hears_nothing(brought: Islands) -> None:
    """Whoever of its processes listens, and whatever it is asked, by any address of this machine."""
    heard: dict[str, str] = {}
    for address in sorted(listeners(family(brought.records[0].pid))):
        with suppress(ConnectionError):  # gone meanwhile
            heard |= ask(address)
    assert {"NodeInfoGcsService", "NodeManagerService"} <= services(heard) and "POST /api/jobs/" in heard
    assert not {question: answer for question, answer in heard.items() if not is_refused(answer)}


def test_an_island_answers_its_own_token_alone(brought: Islands, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RayError, match=r"^island local-0: http://127.* refuses this token; name the file"):
        brought.jobs("local-0", token_of="local-1").submit("true", "x")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with pytest.raises(RayError, match="asks for a token"):
        JobsAPI("local-0", brought.islands["local-0"].jobs or "").job("x")
    monkeypatch.setenv("RAY_ADDRESS", brought.islands["local-1"].jobs or "")
    assert brought.jobs("local-0").job("x") is None
    assert not brought.jobs("local-0").stop("x")


ENTRYPOINTS = {
    "done": "echo $DDM_ISLAND; exit 0",
    "again": "echo 'error: storage is away'; exit 75",
    "never": "echo 'error: nobody made a key'; echo more; exit 1",
    "lives": "sleep 600",
    "leaves": "sleep 600",
    "changes": "exit 1",
    "comes": "exit 0",
}


FIRST = ("done", "again", "never", "lives")


def until(conductors: list[Conductor], state: str, island: str, job: int | None = None) -> list[IslandJob]:
    """Wait until an island is in this state, by the job of this number, for each conductor."""
    jobs: list[IslandJob] = []

    def reached() -> bool:
        jobs[:] = [next(job for job in each.look() if job.island == island) for each in conductors]
        ids = {submission_id(RUN, island, job)} if job else {each.job for each in jobs}
        return all(each.state == state and each.job in ids for each in jobs)

    wait_for(reached, 120, lambda: str(jobs))
    return jobs


@pytest.fixture
def conduct(brought: Islands) -> Iterator[Callable[..., Conductor]]:
    """Begins conductors of islands with these names, which end with the test."""
    with ExitStack() as stack:

        def begin(*names: str) -> Conductor:
            islands = brought.named(*names)
            return stack.enter_context(Conductor(RUN, islands, entrypoint, every=0.3))

        yield begin


def test_jobs_are_kept_started_by_two_at_once(brought: Islands, conduct: Callable[..., Conductor]) -> None:
    """Two conductors have one job on each island, whose exit code says what to do; the second may be gone meanwhile."""
    both, api = [conduct(*FIRST), conduct(*FIRST)], brought.jobs("local-0")
    lives = {job.job for job in until(both, "running", "lives")}
    assert lives == {submission_id(RUN, "lives", 1)}
    done = until(both, "done", "done")
    assert len({job.job for job in done}) == 1
    assert brought.records[0].mark in api.log_tail(done[0].job)
    assert "-3" in until(both, "again", "again", 3)[0].job
    assert "ended with exit code 75, again in " in until(both, "again", "again")[0].text
    never = until(both, "failed", "never")
    assert {job.text for job in never} == {"exit code 1: error: nobody made a key"}
    later = conduct("lives")
    assert {job.job for job in until([later], "running", "lives")} == lives, "a new one finds what the others began"
    assert api.stop(*lives)
    (stopped, *_) = until([*both, later], "stopped", "lives")
    assert {stopped.job} == lives and stopped.text == "somebody stopped it"
    newest = conduct("lives", "never")
    until([newest, *both, later], "running", "lives", 2)
    assert api.job(submission_id(RUN, "lives", 3)) is None
    until([*both, newest], "failed", "never", 2)


def entrypoint(island: Island) -> str:
    """A line of shell that tells all of an island, as those of the product do."""
    return f"{ENTRYPOINTS[island.name]} # {island.price_per_hour}"


def dearer(island: Island) -> Island:
    return island.model_copy(update={"price_per_hour": 1.0})


def test_islands_that_are_new_are_conducted_and_others_left_to_themselves(
    brought: Islands, conduct: Callable[..., Conductor]
) -> None:
    """A job whose island is kept no more goes on; one that failed is started as its changed island is now.

    What somebody stopped stays so, whatever becomes of its island in the file.
    """
    conductor, api = conduct("leaves", "changes"), brought.jobs("local-0")
    until([conductor], "failed", "changes", 1)
    (leaves,) = until([conductor], "running", "leaves")
    now = brought.named("changes", "comes")
    now["changes"] = dearer(now["changes"])
    conductor.keep(now)
    until([conductor], "failed", "changes", 2)
    until([conductor], "done", "comes")
    assert [job.island for job in conductor.look()] == ["changes", "comes"]
    job = api.job(leaves.job)
    assert job and job.status == "RUNNING"
    both = brought.named("leaves", "comes")
    conductor.keep(both)
    until([conductor], "running", "leaves", 1)
    assert api.stop(leaves.job)
    until([conductor], "stopped", "leaves", 1)
    conductor.keep({"comes": both["comes"]})
    conductor.keep({name: dearer(island) for name, island in both.items()})
    until([conductor], "stopped", "leaves", 1)
    until([conductor], "done", "comes", 1)


def test_the_line_that_does_the_same_by_hand(brought: Islands, tmp_path: Path) -> None:
    """It is shell: quotes and blanks arrive as they are."""
    island = brought.islands["local-1"].model_copy(update={"name": 'it\'s "north"'})
    run = f"{tmp_path}/a run"
    line = submit_line(run, island)
    (tmp_path / "ddm").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {shlex.quote(str(tmp_path))}/arguments\n")
    (tmp_path / "ddm").chmod(0o755)
    line = line.replace(" -- ddm work", f" -- {tmp_path}/ddm work")
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    subprocess.run(line, shell=True, env=environment, check=True, capture_output=True, timeout=120)
    wait_for((tmp_path / "arguments").exists, 60)
    wait_for(lambda: (tmp_path / "arguments").read_text().endswith("}\n"), 10)
    verb, url, option, name, placement, text = (tmp_path / "arguments").read_text().splitlines()
    assert (verb, url, option, name, placement) == ("work", run, "--island", island.name, "--placement")
    here = Island.from_json(island.name, text)
    assert (here.train, here.prepare, here.token_file, here.jobs) == (island.train, island.prepare, None, None)


MODELS, SHORT = ("expert", "router"), ("steps=30", "warmup_steps=5")
SMALL = ("partition.num_clusters=2", *(f"{model}.train.{each}" for model in MODELS for each in SHORT))
BY_STORAGE = re.findall(r"^\| `(ddm [^`]+)` \|", section("Islands that pull"), re.MULTILINE)


def test_the_readmes_commands_train_a_run_on_three_islands(brought: Islands) -> None:
    """All of them, in an order in which each has something to do; one island trains by the line that is for hands.

    Rows and shards are there already: other tests have the same commands make them.
    """
    home, first = brought.folder.parents[1], brought.islands["local-0"]
    init, prepare, partition, check, launch = THEN
    run = make_data(f"{home}/runs/three", "digits", SMALL)
    assert "next: ddm prepare runs/three" in say(" ".join([init, *(f"--set {each}" for each in SMALL)]), home)
    assert say(prepare, home).startswith("rows: ") and say(partition, home).startswith("partition: ")
    checked = say(check, home)
    assert sorted(re.findall(r"^(local-\d)  storage sound$", checked, re.MULTILINE)) == [*brought.islands], checked

    def by_storage(line: str, **names: str) -> str:
        for name, stands_for in {"RUN": run.url, "FILE": f"{brought.folder}/islands.yaml", **names}.items():
            assert name in line or name not in names, f"{line} has no {name}"
            line = line.replace(name, stands_for)
        return say(line, home)

    copying, tidy, listing, drain, stop, resume, _ = BY_STORAGE
    assert "experts/001 is asked to stop" in by_storage(stop, **{"expert 3": "expert 1"})
    assert "island local-2 is asked to leave" in by_storage(drain, north="local-2")

    by_hand = say(f"{launch} --dry-run", home).partition("by hand:\n")[2].splitlines()
    (line,) = [line for line in by_hand if f"--address {first.jobs} " in line]
    say(line, home)
    wait_for(lambda: run.finished(expert(0)), 240, lambda: say(f"ddm status {run.url}", home))
    claim = Attempt(run.store, expert(0), 1).claim()
    assert claim["island"] == "local-0" and claim["job"].startswith("raysubmit_")
    # What it does now it writes after the expert's end.
    wait_for(lambda: bool(re.match("local-0 +(trains router|waits: )", by_storage(listing))), 120)
    copied = by_storage(copying, DST=f"{run.url}-copy")
    assert re.search(r"^experts/000: .*, \d+ of \d+ files written$", copied, re.MULTILINE)
    assert claimed(run.store, expert(1)) == []

    assert by_storage(resume, **{"...": "expert 1"}) == "experts/001 may be trained again\n"
    assert f"all that {run.url} trains is finished" in say(launch, home)
    assert run.finished(expert(1)) and run.finished(ROUTER)
    assert "island local-2 may work again" in by_storage(resume, **{"...": "local-2"})
    assert "states" in by_storage(tidy)


def test_the_readmes_line_for_an_island_is_one_that_ddm_knows() -> None:
    """Islands above have worked by its fields and by --placement."""
    ((line,), _) = commands_of("Islands that pull")
    _, verb, *words = shlex.split(line)
    given = main.commands[verb].make_context(verb, words).params
    assert (given["run_url"], given["islands"], given["island"]) == ("s3://lab/run7", "islands.yaml", "north")


def test_a_lost_head_leaves_nothing_and_comes_back(brought: Islands) -> None:
    """SIGKILL of gcs_server: what lives on is ended, by `up`, which brings back that island alone, and by `down`."""
    first, second, third = brought.records
    home = brought.folder.parents[1]
    with Conductor(RUN, {"local-1": brought.islands["local-1"]}, lambda island: "sleep 600", every=0.3) as conductor:
        until([conductor], "running", "local-1", 1)
        os.kill(gcs_server(second), signal.SIGKILL)
        wait_for(lambda: read_process(second.pid) is None, 60)
        (away,) = until([conductor], "away", "local-1")
        assert "can't be reached: " in away.text
        with pytest.raises(RayAway):
            brought.jobs("local-1").job("x")
        printed = say(UP, home)
        assert "local-0 runs already, with " in printed and "local-2 runs already, with " in printed
        assert "local-1 has lost its head" in printed and "local-1 is ready" in printed
        assert not alive([second], [second.temp]) and not Path(second.temp).exists()
        assert (brought.records[0], brought.records[2]) == (first, third)
        # At the same address, with another token; the jobs of before are forgotten.
        until([conductor], "running", "local-1", 1)
        os.kill(gcs_server(brought.records[1]), signal.SIGKILL)
    records, temps = brought.records, [record.temp for record in brought.records]
    printed = say(DOWN, home)
    assert all(f"{name} ended: " in printed for name in brought.islands) and "others listen" not in printed
    assert not alive(records, temps)
    assert not [port for record in records for port in ports.in_use(record.base)]
    assert not [temp for temp in temps if Path(temp).exists()]
    assert sorted(path.name for path in brought.folder.iterdir()) == [".lock", "islands.yaml"]
    began = time.monotonic()
    assert "no islands in " in say(DOWN, home) and time.monotonic() - began < 60
