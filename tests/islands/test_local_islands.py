"""Islands of this machine as their user has them: three are brought up, given jobs, robbed of a head, brought down."""

import os
import re
import shlex
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ddm_ray.cli import main
from ddm_ray.cli.launch import submit_line
from ddm_ray.errors import RayAway, RayError
from ddm_ray.islands.jobs import JobsAPI
from ddm_ray.islands.supervisor import IslandJob, JobSupervisor, submission_id
from ddm_ray.jobs.attempts import Attempt, claimed
from ddm_ray.placement import Island
from ddm_ray.run.graph import ROUTER, expert
from tests.conftest import BIN, ROOT, wait_for
from tests.islands.brought_up import LAUNCH, THEN, Islands, say
from tests.listeners import ask, is_refused, listeners, services
from tests.page_blocks import commands_of
from tests.processes import command, family
from tests.random_run import make_data

pytestmark = pytest.mark.chaos

RUN = "/nowhere/run7"


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Islands]:
    """The page's three islands, below a home folder of their own."""
    islands = Islands.below(tmp_path_factory.mktemp("home"))
    try:
        printed = islands.up()
        assert f"next: ddm launch RUN --islands {islands.folder}/islands.yaml" in printed
        yield islands
    finally:
        islands.down()


def test_each_is_ready_and_closed_to_others(brought: Islands) -> None:
    assert [*brought.islands] == brought.names
    tokens = []
    for island in brought.islands.values():
        path = Path(island.token_file or "")
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (brought.folder, path.parent, path)]
        assert modes == [0o700, 0o700, 0o600]
        tokens.append(path.read_text())
    assert len(set(tokens)) == 3 and all(len(token) == 64 for token in tokens)
    text = (brought.folder / "islands.yaml").read_text()
    text += "".join(command(pid) for number in brought.numbers for pid in family(brought.pid(number)))
    assert not [token for token in tokens if token in text]
    for number in brought.numbers:
        assert stat.S_IMODE(brought.temp(number).stat().st_mode) == 0o700
        base, listened = 20000 + 100 * number, {port for _, port in listeners(family(brought.pid(number)))}
        assert {base, base + 1} <= listened <= set(range(base, base + 100))


def test_a_stranger_hears_nothing(brought: Islands) -> None:
    """Whoever of its processes listens, and whatever it is asked, by any address of this machine."""
    heard: dict[str, str] = {}
    for address in sorted(listeners(family(brought.pid(brought.numbers[0])))):
        with suppress(ConnectionError):  # gone meanwhile
            heard |= ask(address)
    assert {"NodeInfoGcsService", "NodeManagerService"} <= services(heard) and "POST /api/jobs/" in heard
    assert not {question: answer for question, answer in heard.items() if not is_refused(answer)}


def test_an_island_answers_its_own_token_alone(brought: Islands, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = brought.names
    with pytest.raises(RayError, match=rf"^island {first}: http://127.* refuses this token; name the file"):
        brought.jobs(first, token_of=second).submit("true", "x")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with pytest.raises(RayError, match="asks for a token"):
        JobsAPI(first, brought.islands[first].jobs or "").job("x")
    monkeypatch.setenv("RAY_ADDRESS", brought.islands[second].jobs or "")
    assert brought.jobs(first).job("x") is None
    assert not brought.jobs(first).stop("x")


ENTRYPOINTS = {
    "done": "echo $RAY_AUTH_TOKEN_PATH; exit 0",
    "again": "echo 'error: storage is away'; exit 75",
    "never": "echo 'error: nobody made a key'; echo more; exit 1",
    "lives": "sleep 600",
}


FIRST = ("done", "again", "never", "lives")


def until(conductors: list[JobSupervisor], state: str, island: str, job: int | None = None) -> list[IslandJob]:
    """Wait until an island is in this state, by the job of this number, for each supervisor."""
    jobs: list[IslandJob] = []

    def reached() -> bool:
        jobs[:] = [next(job for job in each.look() if job.island == island) for each in conductors]
        ids = {submission_id(RUN, island, job)} if job else {each.job for each in jobs}
        return all(each.state == state and each.job in ids for each in jobs)

    wait_for(reached, 120, lambda: str(jobs))
    return jobs


@pytest.fixture
def conduct(brought: Islands, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., JobSupervisor]]:
    """Begins conductors of islands with these names, which end with the test."""
    monkeypatch.setattr("ddm_ray.islands.supervisor.RESTART_SECONDS", 1.0)
    with ExitStack() as stack:

        def begin(*names: str) -> JobSupervisor:
            islands = brought.named(*names)
            return stack.enter_context(JobSupervisor(RUN, islands, lambda island: ENTRYPOINTS[island.name], every=0.3))

        yield begin


def test_jobs_are_kept_started_by_two_at_once(brought: Islands, conduct: Callable[..., JobSupervisor]) -> None:
    """Two conductors have one job on each island, whose exit code says what to do; the second may be gone meanwhile."""
    both, api = [conduct(*FIRST), conduct(*FIRST)], brought.jobs(brought.names[0])
    lives = {job.job for job in until(both, "running", "lives")}
    assert lives == {submission_id(RUN, "lives", 1)}
    done = until(both, "done", "done")
    assert len({job.job for job in done}) == 1
    assert brought.islands[brought.names[0]].token_file in api.log_tail(done[0].job)
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


def test_the_line_that_does_the_same_by_hand(brought: Islands, tmp_path: Path) -> None:
    """It is shell: quotes and blanks arrive as they are."""
    island = brought.islands[brought.names[1]].model_copy(update={"name": 'it\'s "north"'})
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
PAGE = (ROOT / "docs/howto/machines.md").read_text()
BY_STORAGE = re.findall(r"^\| `(ddm [^`]+)` \|", PAGE.partition("\n## Watch and steer islands\n")[2], re.MULTILINE)


def test_the_pages_commands_train_a_run_on_three_islands(brought: Islands) -> None:
    """All of them, in an order in which each has something to do; one island trains by the line that is for hands.

    Rows and shards are there already: other tests have the same commands make them.
    """
    home, (first, _, third) = brought.home, brought.names
    (init, prepare, partition, check), launch = THEN, LAUNCH
    run = make_data(f"{home}/runs/three", "tiny", SMALL)
    assert "next: ddm prepare runs/three" in say(" ".join([init, *(f"--set {each}" for each in SMALL)]), home)
    assert say(prepare, home).startswith("rows: ") and say(partition, home).startswith("partition: ")
    checked = say(check, home)
    assert sorted(re.findall(r"^(local-\d+)  storage sound$", checked, re.MULTILINE)) == [*brought.islands], checked

    def by_storage(line: str, **names: str) -> str:
        for name, stands_for in {"RUN": run.url, "FILE": f"{brought.folder}/islands.yaml", **names}.items():
            assert name in line or name not in names, f"{line} has no {name}"
            line = line.replace(name, stands_for)
        return say(line, home)

    listing, drain, stop, resume, _ = BY_STORAGE
    assert "experts/001 is asked to stop" in by_storage(stop, **{"expert 3": "expert 1"})
    assert f"island {third} is asked to leave" in by_storage(drain, north=third)

    by_hand = say(f"{launch} --dry-run", home).partition("by hand:\n")[2].splitlines()
    (line,) = [line for line in by_hand if f"--address {brought.islands[first].jobs} " in line]
    say(line, home)
    wait_for(lambda: run.finished(expert(0)), 240, lambda: say(f"ddm status {run.url}", home))
    claim = Attempt(run.store, expert(0), 1).claim()
    assert claim["island"] == first and claim["job"].startswith("raysubmit_")
    # What it does now it writes after the expert's end.
    wait_for(lambda: bool(re.match(f"{first} +(trains router|waits: )", by_storage(listing))), 120)
    copied = by_storage("ddm copy RUN DST", DST=f"{brought.home}/copy")
    assert re.search(r"^experts/000: .*, \d+ of \d+ files written$", copied, re.MULTILINE)
    assert claimed(run.store, expert(1)) == []

    assert by_storage(resume, north="expert 1") == "experts/001 may be trained again\n"
    assert f"all that {run.url} trains is finished" in say(launch, home)
    assert run.finished(expert(1)) and run.finished(ROUTER)
    assert f"island {third} may work again" in by_storage(resume, north=third)
    assert "states" in by_storage("ddm tidy RUN")


def test_the_pages_line_for_an_island_is_one_that_ddm_knows() -> None:
    """Islands above have worked by --placement and by the fields of a file."""
    (line,) = commands_of("howto/machines.md", "ddm work")
    _, verb, *words = shlex.split(line)
    given = main.commands[verb].make_context(verb, words).params
    assert (given["run_url"], given["island"]) == ("s3://lab/run7", "north")
    assert Island.from_json("north", given["placement"]).train.use_gpu


def test_a_lost_head_leaves_nothing_and_comes_back(brought: Islands) -> None:
    """SIGKILL of gcs_server: what lives on is ended, by `up`, which brings back that island alone, and by `down`."""
    first, second, third = brought.numbers
    name, before = brought.names[1], [brought.pid(number) for number in brought.numbers]
    with JobSupervisor(RUN, {name: brought.islands[name]}, lambda island: "sleep 600", every=0.3) as supervisor:
        until([supervisor], "running", name, 1)
        lost, temp = family(before[1]), brought.temp(second)
        commands = {pid: command(pid) for pid in lost}
        os.kill(brought.gcs_server(second), signal.SIGKILL)
        wait_for(lambda: not command(before[1]), 60)
        (away,) = until([supervisor], "away", name)
        assert "can't be reached: " in away.text
        with pytest.raises(RayAway):
            brought.jobs(name).job("x")
        printed = brought.up()
        assert f"island {first} runs already\n" in printed and f"island {third} runs already\n" in printed
        assert f"island {second} runs\n" in printed
        # A process that was ending has no command, as one that has ended.
        left = {pid: commands[pid] for pid in lost if commands[pid] and command(pid) == commands[pid]}
        assert not left and not temp.exists(), left
        assert [brought.pid(first), brought.pid(third)] == [before[0], before[2]]
        # At the same address, with another token; the jobs of before are forgotten.
        until([supervisor], "running", name, 1)
        os.kill(brought.gcs_server(second), signal.SIGKILL)
    printed = brought.down()
    assert printed.splitlines() == [f"island {number} is ended" for number in sorted(brought.numbers, key=str)]
    logs = {f"{number}.log" for number in brought.numbers}
    assert {path.name for path in brought.folder.iterdir()} == {"lock", *logs}
    assert brought.down() == ""
