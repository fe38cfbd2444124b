"""The folder of a private Ray goes with its command, or, if that was killed, with the next one."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from ddm_ray import ray_session
from ddm_ray.ray_session import LOCK, PREFIX, busy_cores, private_folder


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


def test_cores_are_busy_while_their_command_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "PREFIX", f"{PREFIX}test-{os.getpid()}-")  # others' commands don't count
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
