"""Islands of this machine as their user has them: two are brought up, given jobs, robbed of a head, brought down."""

import os
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddm_ray.cli.launch import submit_line
from ddm_ray.errors import RayAway, RayError
from ddm_ray.islands import ports
from ddm_ray.islands.conduct import Conductor, IslandJob, submission_id
from ddm_ray.islands.jobs import JobsAPI
from ddm_ray.islands.local_files import IslandFolder, LocalIsland
from ddm_ray.islands.processes import members, processes, read_process
from ddm_ray.placement import Island, load_islands
from tests.conftest import BIN, ddm, wait_for
from tests.listeners import ask, is_refused, listeners, services
from tests.processes import command, family

RUN = "/nowhere/run7"


@dataclass(frozen=True)
class Pair:
    """Two islands, brought up by `ddm islands up`, and what that printed."""

    folder: Path
    printed: str

    @property
    def records(self) -> list[LocalIsland]:
        return IslandFolder(self.folder).islands()

    @property
    def islands(self) -> dict[str, Island]:
        return load_islands(str(self.folder / "islands.yaml"))

    def jobs(self, name: str, token_of: str | None = None) -> JobsAPI:
        island, other = self.islands[name], self.islands[token_of or name]
        return JobsAPI(name, island.jobs or "", other.token_file)

    def named(self, *names: str) -> dict[str, Island]:
        """The first island under several names, each of which is then conducted by itself."""
        first = self.islands["local-0"]
        return {name: first.model_copy(update={"name": name}) for name in names}


def bring(verb: str, folder: Path, *arguments: str) -> str:
    done = ddm("islands", verb, "--folder", str(folder), *arguments, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alive(records: list[LocalIsland], temps: list[str]) -> list[str]:
    """Command lines of what still lives of islands: by our rules, and by the folders that their commands name."""
    everything = processes()
    ours = {process.pid for record in records for process in members(everything, record.leader)}
    ours |= {pid for pid in everything if any(temp in command(pid) for temp in temps)}
    return [f"{pid} {command(pid)}" for pid in ours - {os.getpid()}]


def gcs_server(record: LocalIsland) -> int:
    (server,) = [pid for pid in family(record.pid) if command(pid).split(" ")[0].endswith("gcs_server")]
    return server


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("islands") / "pair"
    try:
        yield Pair(folder, bring("up", folder, "--local", "2", "--cpus", "1"))
    finally:
        records = IslandFolder(folder).islands()
        bring("down", folder)
        assert not alive(records, [record.temp for record in records])


def test_each_is_ready_and_closed_to_others(pair: Pair) -> None:
    assert [*pair.islands] == ["local-0", "local-1"]
    assert f"next: ddm launch RUN --islands {pair.folder}/islands.yaml" in pair.printed
    tokens = []
    for name, island in pair.islands.items():
        assert f"{name} is ready, with 1 CPU: {island.jobs}" in pair.printed
        path = Path(island.token_file or "")
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (pair.folder, path.parent, path)]
        assert modes == [0o700, 0o700, 0o600]
        tokens.append(path.read_text())
    assert len(set(tokens)) == 2 and all(len(token) == 64 for token in tokens)
    text = (pair.folder / "islands.yaml").read_text() + pair.printed
    text += "".join(command(pid) for record in pair.records for pid in family(record.pid))
    assert not [token for token in tokens if token in text]
    for record in pair.records:
        assert stat.S_IMODE(Path(record.temp).stat().st_mode) == 0o700
        listened = {port for _, port in listeners(family(record.pid))}
        assert {record.base, record.base + 1} <= listened <= set(range(record.base, record.base + ports.SIZE))


def test_a_stranger_hears_nothing(pair: Pair) -> None:
    """Whoever of its processes listens, and whatever it is asked, by any address of this machine."""
    heard: dict[str, str] = {}
    for address in sorted(listeners(family(pair.records[0].pid))):
        with suppress(ConnectionError):  # gone meanwhile
            heard |= ask(address)
    assert {"NodeInfoGcsService", "NodeManagerService"} <= services(heard) and "POST /api/jobs/" in heard
    assert not {question: answer for question, answer in heard.items() if not is_refused(answer)}


def test_an_island_answers_its_own_token_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RayError, match=r"^island local-0: http://127.* refuses this token; name the file"):
        pair.jobs("local-0", token_of="local-1").submit("true", "x")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with pytest.raises(RayError, match="asks for a token"):
        JobsAPI("local-0", pair.islands["local-0"].jobs or "").job("x")
    monkeypatch.setenv("RAY_ADDRESS", pair.islands["local-1"].jobs or "")
    assert pair.jobs("local-0").job("x") is None
    assert not pair.jobs("local-0").stop("x")


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
def conduct(pair: Pair) -> Iterator[Callable[..., Conductor]]:
    """Begins conductors of islands with these names, which end with the test."""
    with ExitStack() as stack:

        def begin(*names: str) -> Conductor:
            islands = pair.named(*names)
            return stack.enter_context(Conductor(RUN, islands, lambda island: ENTRYPOINTS[island.name], every=0.3))

        yield begin


def test_jobs_are_kept_started_by_two_at_once(pair: Pair, conduct: Callable[..., Conductor]) -> None:
    """Two conductors have one job on each island, whose exit code says what to do; the second may be gone meanwhile."""
    both, api = [conduct(*FIRST), conduct(*FIRST)], pair.jobs("local-0")
    lives = {job.job for job in until(both, "running", "lives")}
    assert lives == {submission_id(RUN, "lives", 1)}
    done = until(both, "done", "done")
    assert len({job.job for job in done}) == 1
    assert pair.records[0].mark in api.log_tail(done[0].job)
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


def test_islands_that_are_new_are_conducted_and_others_left_to_themselves(
    pair: Pair, conduct: Callable[..., Conductor]
) -> None:
    """A job whose island is kept no more goes on; one whose island has changed is started as it is now."""
    conductor, api = conduct("leaves", "changes"), pair.jobs("local-0")
    until([conductor], "failed", "changes", 1)
    (leaves,) = until([conductor], "running", "leaves")
    now = pair.named("changes", "comes")
    now["changes"] = now["changes"].model_copy(update={"price_per_hour": 1.0})
    conductor.keep(now)
    until([conductor], "failed", "changes", 2)
    until([conductor], "done", "comes")
    assert [job.island for job in conductor.look()] == ["changes", "comes"]
    job = api.job(leaves.job)
    assert job and job.status == "RUNNING"
    assert api.stop(leaves.job)


def test_the_line_that_does_the_same_by_hand(pair: Pair, tmp_path: Path) -> None:
    """It is shell: quotes and blanks arrive as they are."""
    island = pair.islands["local-1"].model_copy(update={"name": 'it\'s "north"'})
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


def test_a_lost_head_leaves_nothing_and_comes_back(pair: Pair) -> None:
    """SIGKILL of gcs_server: what lives on is ended, by `up`, which brings back that island alone, and by `down`."""
    first, second = pair.records
    with Conductor(RUN, {"local-1": pair.islands["local-1"]}, lambda island: "sleep 600", every=0.3) as conductor:
        until([conductor], "running", "local-1", 1)
        os.kill(gcs_server(second), signal.SIGKILL)
        wait_for(lambda: read_process(second.pid) is None, 60)
        (away,) = until([conductor], "away", "local-1")
        assert "can't be reached: " in away.text
        with pytest.raises(RayAway):
            pair.jobs("local-1").job("x")
        printed = bring("up", pair.folder, "--local", "2", "--cpus", "1")
        assert "local-0 runs already, with 1 CPU" in printed
        assert "local-1 has lost its head" in printed and "local-1 is ready" in printed
        assert not alive([second], [second.temp]) and not Path(second.temp).exists()
        assert pair.records[0] == first
        # At the same address, with another token; the jobs of before are forgotten.
        until([conductor], "running", "local-1", 1)
        os.kill(gcs_server(pair.records[1]), signal.SIGKILL)
    records, temps = pair.records, [record.temp for record in pair.records]
    printed = bring("down", pair.folder)
    assert "local-0 ended: " in printed and "local-1 ended: " in printed and "others listen" not in printed
    assert not alive(records, temps)
    assert not [port for record in records for port in ports.in_use(record.base)]
    assert not [temp for temp in temps if Path(temp).exists()]
    assert sorted(path.name for path in pair.folder.iterdir()) == [".lock", "islands.yaml"]
    began = time.monotonic()
    assert "no islands in " in bring("down", pair.folder) and time.monotonic() - began < 60
