"""The folder of a private Ray goes with its command, or, if that was killed, with the next one."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

from ddm_ray.ray_session import LOCK, PREFIX, private_folder


def killed_in_its_folder() -> Path:
    """The folder of a process that was killed while it had it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with private_folder() as folder:
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
