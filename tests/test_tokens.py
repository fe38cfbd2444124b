"""Every Ray that is started here asks for a token: nobody who doesn't have it gets an answer, from any listener."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddm_ray import ray_session
from tests.conftest import BIN, ROOT, Island, wait_for
from tests.islands.network import lacks, network
from tests.listeners import KNOWN, WRONG, ask, asked_by, is_refused, listeners, services
from tests.processes import command, family
from tests.random_run import make_data

pytestmark = pytest.mark.integration

# A private Ray, which lives until the next line of standard input; then the island.
PRIVATE = """
import json, os, sys
import ray
from ddm_ray.ray_session import ray_session

def report(**seen):
    names = {name: value for name, value in os.environ.items() if name.startswith(("RAY_AUTH", "RAY_TRAIN"))}
    print(json.dumps(seen | {"environment": names}), flush=True)

def job():
    return os.environ["RAY_AUTH_TOKEN"]

report()
with ray_session("local"):
    worker = ray.get(ray.remote(job).remote())
    report(gcs=ray.get_runtime_context().gcs_address, worker=worker, folder=ray.nodes()[0]["ObjectStoreSocketName"])
    sys.stdin.readline()
report()
with ray_session(sys.argv[1]):
    report(seven=ray.get(ray.remote(lambda: 7).remote()))
os.environ.pop("RAY_AUTH_MODE"), os.environ.pop("RAY_AUTH_TOKEN_PATH")
with ray_session(sys.argv[1], sys.argv[2]):
    eight = ray.get(ray.remote(lambda: 8).remote())
report(eight=eight)
"""
WITHOUT = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
NOBODY = 65534
# Of the services of every Ray.
SERVICES = {"NodeInfoGcsService", "InternalKVGcsService", "NodeManagerService", "ObjectManagerService"}
SERVICES |= {"ReporterService"}


@dataclass
class Private:
    """A process with a private Ray."""

    process: subprocess.Popen[str]
    home: Path

    def next(self) -> dict:
        """What it reports next."""
        assert self.process.stdout
        line = next((line for line in self.process.stdout if line.startswith("{")), "")
        return json.loads(line)


@pytest.fixture(scope="module")
def private(island: Island, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    home = tmp_path_factory.mktemp("home")
    process = subprocess.Popen(
        [sys.executable, "-c", PRIVATE, island.ray, str(island.token)],
        env={**os.environ, "HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield Private(process, home)
    finally:
        process.kill()
        process.wait()


def heard(pid: int) -> set[str]:
    """Ask all that a process and those below it listen to, without a token and with another one's.

    The services, which refused to answer.
    """
    refused: set[str] = set()
    for address in sorted(listeners(family(pid))):
        for token in (None, WRONG):
            with suppress(ConnectionError):  # gone meanwhile
                answers = ask(address, token)
                assert all(map(is_refused, answers.values())), (address, token, answers)
                refused |= services(answers)
    return refused


def require_closed(pid: int, gcs: str, token: str, others: set[str]) -> None:
    """Nobody of a Ray's processes answers a stranger, and the GCS answers who has the token, which no `ps` shows."""
    wait_for(lambda: heard(pid) >= SERVICES | others, 200)
    host, _, port = gcs.rpartition(":")
    assert ask((host, int(port)), WRONG)[KNOWN] == "UNAUTHENTICATED"
    assert ask((host, int(port)), token) == {KNOWN: "OK"}
    assert not [line for line in map(command, family(pid)) if token in line]


def require_closed_to_others(pid: int, files: list[Path]) -> None:
    """Neither another machine nor another user of this one gets an answer; the user reads none of these files."""
    addresses = listeners(family(pid))
    if os.getuid():
        return  # nobody here can become somebody else
    heard = asked_by([], addresses, NOBODY)
    if not lacks():
        with network(["stranger"]) as net:
            prefix = ["ip", "netns", "exec", net.machines["stranger"].namespace]
            from_outside = asked_by(prefix, {(net.storage, port) for _, port in addresses})
        assert from_outside, "Ray listens on all addresses"
        heard |= from_outside
    assert heard and not {question: answer for question, answer in heard.items() if not is_refused(answer)}
    for path in files:
        reading = subprocess.run(["cat", str(path)], user=NOBODY, capture_output=True, check=False)
        assert reading.returncode and b"Permission denied" in reading.stderr


def require_private(folder: Path, token: str) -> None:
    """Ray's files are in a folder that its user alone can enter, and the token is in none of them."""
    above = folder.parent.stat()
    assert (stat.S_IMODE(above.st_mode), above.st_uid) == (0o700, os.getuid())
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert token.encode() not in path.read_bytes(), path


def test_an_island_answers_nobody_without_its_token(island: Island, tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), num_rows=60)
    joining = [str(BIN / "ddm"), "train", run.url, "router", "--address", island.ray]
    with subprocess.Popen(joining, env=WITHOUT, stderr=subprocess.PIPE, text=True) as stranger:
        token = island.token.read_text()
        assert len(token) == 64
        require_closed(island.process.pid, island.ray, token, {"RayletDriver"})
        home = island.token.parent
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (home, island.token)]
        assert (modes, island.token.stat().st_uid) == ([0o700, 0o600], os.getuid())
        require_private((home / "ray").resolve(), token)
        require_closed_to_others(island.process.pid, [island.token, *(home / "ray").glob("session_latest/logs/gcs*")])
        job = [str(BIN / "ray"), "job", "submit", "--address", island.jobs, "--", "true"]
        refused = subprocess.run(job, env=WITHOUT, capture_output=True, text=True, check=False)
        assert refused.returncode and "Missing authentication token" in refused.stderr
        assert ask(("127.0.0.1", int(island.jobs.rpartition(":")[2])), token)["GET /api/version"] == "200"
        _, errors = stranger.communicate(timeout=120)
    assert stranger.returncode == 1
    assert f"error: the Ray at {island.ray} refuses this token; set RAY_AUTH_MODE=token" in errors


OTHER_VERSION = """
import sys, ray
ray.__version__ = "2.1.0"
from ddm_ray.cli import main
sys.argv = ["ddm", *sys.argv[1:]]
main()
"""


def test_an_island_of_another_version_of_ray_is_told_in_one_line(island: Island, tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), num_rows=60)
    run.store.delete("partition")
    before = run.store.sizes("")
    room = {"address": island.ray, "token_file": str(island.token)}
    (tmp_path / "islands.yaml").write_text(json.dumps({"islands": {"room": room}}))
    joining = ["partition", run.url, "--islands", str(tmp_path / "islands.yaml"), "--island", "room"]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION, *joining], env=WITHOUT, capture_output=True, text=True, check=False
    )
    *before_it, line = done.stderr.splitlines()
    assert not [other for other in before_it if other.startswith(("error", "Traceback"))], done.stderr
    assert line.startswith(f"error: the Ray at {island.ray} has another version of Ray or Python: Version mismatch")
    assert line.endswith("install the same there and here")
    assert run.store.sizes("") == before


@pytest.mark.chaos
def test_a_private_ray_has_a_token_of_its_own_while_it_lasts(private: Private, island: Island) -> None:
    """Then the process joins the island, with the token that its user gave it, and with the one that a file has."""
    given, up = private.next(), private.next()
    token = up["environment"]["RAY_AUTH_TOKEN"]
    assert (len(token), up["worker"]) == (64, token) and up["environment"]["RAY_AUTH_MODE"] == "token"
    require_closed(private.process.pid, up["gcs"], token, {"CoreWorkerService"})
    folder = next(path for path in Path(up["folder"]).parents if path.parent.parent == Path("/tmp"))
    require_private(folder, token)
    require_closed_to_others(private.process.pid, [*folder.glob("session_latest/logs/gcs*")])
    joining = [str(BIN / "ray"), "start", "--address", up["gcs"]]
    stranger = subprocess.run(joining, env=WITHOUT, capture_output=True, text=True, check=False, timeout=120)
    assert stranger.returncode and "InvalidAuthToken" in stranger.stdout + stranger.stderr
    print(file=private.process.stdin, flush=True)
    after, joined = private.next(), private.next()
    assert not folder.parent.exists()
    assert after["environment"] == joined["environment"] == given["environment"]
    assert given["environment"] == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(island.token)}
    assert joined["seven"] == 7
    assert private.next() == {"eight": 8, "environment": {}}
    assert private.process.wait(60) == 0
    assert not (private.home / ".ray").exists()


@pytest.mark.parametrize("mode", ["token", "disabled", None])
def test_no_mode_of_the_shell_leaves_a_private_ray_open(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    else:
        monkeypatch.delenv("RAY_AUTH_MODE")
    first, second = ray_session._private(), ray_session._private()
    assert first["RAY_AUTH_MODE"] == "token" and len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


def test_a_node_without_a_token_is_not_started() -> None:
    script = str(ROOT / "cluster_configs/slices/node.sh")
    for arguments in (["head"], ["127.0.0.1:6379", "island-a", "1"]):
        refused = subprocess.run([script, *arguments], env=WITHOUT, capture_output=True, text=True, check=False)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr.startswith("node.sh: no token; set RAY_AUTH_TOKEN_PATH")


def test_a_folder_of_somebody_else_gets_no_token(tmp_path: Path) -> None:
    (tmp_path / ".ddm").mkdir()
    folder = tmp_path / ".ddm/island-7"
    if os.getuid():
        folder.symlink_to("/")
    else:
        folder.mkdir()
        os.chown(folder, 1, 1)
    script = str(ROOT / "cluster_configs/local/island.sh")
    environment = {**WITHOUT, "HOME": str(tmp_path)}
    refused = subprocess.run([script, "7"], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr == f"island.sh: {folder} belongs to somebody else, who could read the token; remove it\n"
    assert os.getuid() or not list(folder.iterdir())


def test_only_the_token_is_closed_to_others(tmp_path: Path) -> None:
    """What an island's workers write on storage that islands share is as open as its user's umask has it."""
    ray = tmp_path / "bin/ray"
    ray.parent.mkdir()
    ray.write_text('#!/bin/sh\numask\nrm -r "$(dirname "$(readlink "$HOME/.ddm/island-7/ray")")"\n')
    ray.chmod(0o755)
    environment = {**WITHOUT, "HOME": str(tmp_path), "PATH": f"{ray.parent}:{os.environ['PATH']}"}
    script = str(ROOT / "cluster_configs/local/island.sh")
    started = subprocess.run([script, "7", "1"], env=environment, umask=0o022, capture_output=True, text=True)
    assert (started.returncode, started.stdout, started.stderr) == (0, "0022\n", "")
    home = tmp_path / ".ddm/island-7"
    token = home / "token"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (home, token)] == [0o700, 0o600]
    assert len(token.read_text()) == 64


def test_no_command_that_users_are_given_closes_more_than_the_token() -> None:
    files = [path for path in (ROOT / "cluster_configs").rglob("*") if path.is_file()]
    lines = [line for file in files for line in file.read_text().splitlines() if "umask" in line]
    assert lines and all("(umask 077; " in line for line in lines)
