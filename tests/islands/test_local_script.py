"""islands.sh with a stand-in for Ray: it ends what it has started, all of it and nothing else, and says what failed."""

import fcntl
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from ddm_ray.placement import load_islands
from tests.conftest import ROOT, free_island, wait_for
from tests.processes import command, family

pytestmark = pytest.mark.contract

SCRIPT = str(ROOT / "cluster_configs/local/islands.sh")
# A head that runs, whose child ignores SIGTERM; jobs succeed. BROKEN: a file by which heads end at once.
RAY = """#!/bin/bash
[ $1 = job ] && exit
[ -e "$HOME/BROKEN" ] && { echo "no port is free"; exit 1; }
(trap '' TERM; sleep 600; true) &
echo "Ray runtime started."
wait
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ray").write_text(RAY)
    (tmp_path / "bin/ray").chmod(0o755)
    return tmp_path


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}", "CPUS": "3"}
    return subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=120, check=False)


def pid(home: Path, number: str) -> int:
    return int((home / f".ddm/islands/{number}.pid").read_text())


def test_islands_are_brought_up_once_and_ended_wholly(home: Path) -> None:
    first, second = str(free_island()), str(free_island())
    done = run(home, "up", first, second)
    assert done.returncode == 0, done.stderr
    started = [f"{words}\n" for each in (first, second) for words in (f"starting island {each}", f"island {each} runs")]
    assert done.stdout.startswith("".join(started))
    islands = load_islands(str(home / ".ddm/islands/islands.yaml"))
    assert [*islands] == [f"local-{first}", f"local-{second}"]
    assert islands[f"local-{first}"].train.asked == {"CPU": 1.5} and islands[f"local-{first}"].train.threads == 3
    leaders = [pid(home, number) for number in (first, second)]
    members = [each for leader in leaders for each in family(leader)]
    assert all(os.getsid(leader) == leader for leader in leaders) and len(members) >= 6
    assert f"island {first} runs already" in run(home, "up", first, second).stdout
    assert [pid(home, number) for number in (first, second)] == leaders
    assert run(home, "down", second).stdout == f"island {second} is ended\n"
    assert pid(home, first) == leaders[0] and (home / ".ddm/islands/islands.yaml").exists()
    assert run(home, "down").stdout == f"island {first} is ended\n"
    wait_for(lambda: not any(map(command, members)), 10, lambda: str([*map(command, members)]))
    assert sorted(path.name for path in (home / ".ddm").iterdir()) == ["islands"]
    assert run(home, "down").stdout == ""


def is_unlocked(path: Path) -> bool:
    """True if no process holds the lock."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_pid_that_came_again_is_spared(home: Path) -> None:
    number = str(free_island())
    assert run(home, "up", number).returncode == 0
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        os.killpg(pid(home, number), signal.SIGKILL)
        wait_for(lambda: is_unlocked(home / f".ddm/islands/{number}.lock"), 30)  # the group dies one by one
        (home / f".ddm/islands/{number}.pid").write_text(str(stranger.pid))
        assert run(home, "down").returncode == 0
        assert stranger.poll() is None
        stranger.kill()


def test_an_island_that_does_not_start_leaves_a_log(home: Path) -> None:
    number = free_island()
    (home / "BROKEN").touch()
    done = run(home, "up", str(number))
    log = home / f".ddm/islands/{number}.log"
    line = f"islands.sh: island {number} doesn't start: no port is free; see {log}\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert {path.name for path in (home / ".ddm/islands").iterdir()} == {"lock", log.name}


def test_an_island_of_somebody_else_is_left_alone(home: Path) -> None:
    """One that was started by hand, whose token lies where ours would."""
    number = free_island()
    token = home / f".ddm/island-{number}/token"
    token.parent.mkdir(parents=True)
    token.write_text("theirs")
    with socket.create_server(("127.0.0.1", 20000 + 100 * number)):
        done = run(home, "up", str(number))
    assert (done.returncode, done.stderr) == (1, f"islands.sh: island {number} doesn't start: its port is in use\n")
    assert run(home, "down").returncode == 0 and token.read_text() == "theirs"


@pytest.mark.parametrize("words", [("up",), ("up", "x"), ("sideways",)])
def test_other_words_are_refused(home: Path, words: tuple[str, ...]) -> None:
    done = run(home, *words)
    assert (done.returncode, done.stderr) == (2, "usage: islands.sh up NUMBER... | down [NUMBER...]\n")
