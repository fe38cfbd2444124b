"""The folder of a private Ray goes with its command, or, if that was killed, with the next one."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddm_ray import private_folder as private_folders
from ddm_ray.errors import StorageError
from ddm_ray.private_folder import LIBRARIES, LOCK, PREFIX, busy_cores, locks, private_folder
from ddm_ray.store.refusals import in_words, temporary_folder

pytestmark = pytest.mark.contract


def killed_in_its_folder(cores: float = 0.0) -> Path:
    """The folder of a process that was killed while it had it, and kept `cores` busy."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with private_folder(cores) as folder:
            Path(folder, "ray").mkdir()
            os.write(writing, folder.encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return Path(pipe.read())


def test_what_a_killed_command_left_goes_and_what_is_held_stays() -> None:
    with private_folder() as held:
        left, unlocked = killed_in_its_folder(), Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
        assert (left / "ray").is_dir() and (left / LOCK).is_file()
        with private_folder() as other:
            assert not left.exists()
            assert Path(held).is_dir() and Path(other).is_dir()
            assert unlocked.is_dir(), "an older version's, which may be in use"
        shutil.rmtree(unlocked)
    assert not Path(held).exists() and not Path(other).exists()


def test_it_lies_where_tmpdir_says_unless_paths_of_sockets_get_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:
        for place, used in ((short, short), (f"{short}/{'x' * 20}", "/tmp")):
            Path(place).mkdir(exist_ok=True)
            monkeypatch.setattr(tempfile, "tempdir", place)
            with private_folder(2.5) as folder:
                assert str(Path(folder).parent) == used
                assert Path(folder, LOCK) in locks(), "others see it"


def test_a_full_temporary_folder_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        with open("/dev/full", "w") as device:
            device.write("x")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(Path, "write_text", full)
    way_out = "No space left on device; make room there, or name another folder by TMPDIR"
    with pytest.raises(StorageError, match=f"{way_out}, with a path of 20 bytes at most$") as refused, private_folder():
        pass
    assert not refused.value.passes
    no_space = OSError(errno.ENOSPC, "")
    assert in_words(no_space) == "what this writes to: No space left on device"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    assert re.search(f"{tempfile.gettempdir()} or {os.getcwd()}: {way_out}$", in_words(no_space))
    assert in_words(OSError(errno.EMFILE, "")) == "storage: Too many open files"
    assert in_words(OSError(errno.ENOSPC, "", "a.png")) == "a.png: No space left on device; free some space there"
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(StorageError, match=r"No usable temporary directory found in \['/proc'\]; make room there"):
        temporary_folder()
    assert "No space left on device" in in_words(no_space)


def test_the_logs_of_a_command_that_ended_abruptly_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(private_folders, "PREFIX", f"{PREFIX}test-{os.getpid()}-")
    left = killed_in_its_folder()
    logs = left / "ray/session_1/logs"
    logs.mkdir(parents=True)
    (left / "ray/session_latest").symlink_to(logs.parent)
    (logs / "raylet.out").write_text("begun")
    (left / LIBRARIES).write_text("check failed")
    for _ in range(2):
        with private_folder():
            assert not left.exists()
    (kept,) = tmp_path.glob("ddm-ray/logs/*")
    assert {file.name for file in kept.iterdir()} == {"raylet.out", LIBRARIES}
    line = f"the logs of Ray of a command that ended abruptly are kept in {kept}"
    assert capsys.readouterr().err.splitlines() == [line]


def test_cores_are_busy_while_their_command_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folders, "PREFIX", f"{PREFIX}test-{os.getpid()}-")  # others' commands don't count
    begun, ending = os.pipe(), os.pipe()
    assert busy_cores() == 0
    child = os.fork()
    if child == 0:
        with private_folder(1.5):
            os.write(begun[1], b"!")
            os.read(ending[0], 1)
        os._exit(0)
    assert os.read(begun[0], 1)
    with private_folder(8):
        assert busy_cores() == 1.5, "its own don't count"
    killed_in_its_folder(4)
    assert busy_cores() == 1.5, "nor those of a killed one"
    os.write(ending[1], b"!")
    os.waitpid(child, 0)
    assert busy_cores() == 0
    with private_folder():
        pass  # what the killed one left goes


def test_a_ray_that_does_not_start_is_tried_again_and_said_in_a_line(tmp_path: Path) -> None:
    """One whose GCS is held up for a minute at each event, while its start is waited for for a second."""
    held_up = {"RAY_testing_asio_delay_us": "*=60000000:60000000", "RAY_gcs_server_port_wait_time_s": "1"}
    names = {**held_up, "XDG_STATE_HOME": str(tmp_path)}
    code = (
        "from ddm_ray import ray_session; from ddm_ray.errors import RayAway\n"
        "ray_session.AGAIN_SECONDS = (0.1, 0.1)\n"
        "try:\n with ray_session.ray_session('local'): pass\n"
        "except RayAway as error: print(error)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **names}, check=True)
    assert done.stdout.startswith("a private Ray doesn't start, 3 times: ") and done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    kept = Path(last.removeprefix("the logs of Ray are kept in "))
    assert kept.is_relative_to(tmp_path) and list(kept.glob("gcs_server*"))
