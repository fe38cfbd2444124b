"""Processes that decode: one for each call at a time, begun again after a death, and ended with whoever asks."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ddm_ray.config import DataConfig
from ddm_ray.data.images import decode
from ddm_ray.data.prepare.decoder_process import TOO_LARGE, TOO_SLOW, decode_apart
from ddm_ray.data.prepare.decoding import BATCH_ROWS, decode_rows
from ddm_ray.data.sources import Encoded
from ddm_ray.errors import DataError
from tests.conftest import ROOT, wait_for
from tests.data.bombs import FEW, comments, good_images
from tests.processes import command, family

pytestmark = pytest.mark.contract

SHAPE = (3, 16, 16)


def decoded(*images: bytes) -> tuple[list[str], np.ndarray]:
    """Reasons and pixels_NHWC."""
    pixels_NHWC = np.zeros((len(images), 16, 16, 3), np.uint8)
    return [answer.reason for answer in decode_apart(images, list(pixels_NHWC))], pixels_NHWC


def decoders(parent: int) -> list[int]:
    """Processes that decode for one."""
    return [pid for pid in family(parent)[1:] if "ddm_ray.data.prepare.decoder" in command(pid)]


def test_images_that_take_too_long_or_too_much_are_alone_with_their_reasons() -> None:
    first, second = good_images(2)
    large = FEW["strip.tif"]()
    reasons, pixels_NHWC = decoded(first, comments(), large, b"", second, large)
    assert reasons == ["", TOO_SLOW, TOO_LARGE, "ValueError: empty file", "", TOO_LARGE]
    for place, content in ((0, first), (4, second)):
        assert (pixels_NHWC[place] == decode(content, SHAPE)).all()


def test_rows_in_the_threads_of_a_pool_are_the_same() -> None:
    images = good_images(3 * BATCH_ROWS + 5)
    rows = [Encoded(f"{number}", content, number) for number, content in enumerate(images)]
    rows[3], rows[BATCH_ROWS] = Encoded("3", b"no image", 3), Encoded("x", None, None, "gone")
    config = DataConfig(num_classes=1000, channels=3, image_size=16)
    one, before = decode_rows(rows, config), {*decoders(os.getpid())}
    with ThreadPoolExecutor(3) as pool:
        several = decode_rows(rows, config, pool)
        assert 1 <= len({*decoders(os.getpid())} - before) <= 3, "one a thread"
    for rows_of in (one, several):
        assert rows_of.rejected == [
            {"id": "3", "reason": "UnidentifiedImageError: not an image of a known format"},
            {"id": "x", "reason": "gone"},
        ]
        assert rows_of.ids == [row.id for row in rows if row.id not in ("3", "x")]
        assert rows_of.ids == [str(label) for label in rows_of.conditions]
    assert one.content_hashes == several.content_hashes
    assert (one.pixels_NHWC == several.pixels_NHWC).all()
    assert (one.pixels_NHWC[-1] == decode(images[-1], SHAPE)).all()
    assert len(one.pixels_NHWC) == len(rows) - 2


def test_a_process_that_somebody_killed_is_no_images_fault() -> None:
    (content,) = good_images(1)
    assert decoded(content)[0] == [""]
    assert decoders(os.getpid())
    for pid in decoders(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    assert decoded(content, content)[0] == ["", ""]
    assert pid not in decoders(os.getpid())


def test_a_process_that_is_killed_time_and_again_ends_the_stage() -> None:
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.01):
            for pid in decoders(os.getpid()):
                os.kill(pid, signal.SIGTERM)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(DataError, match=r"the process that decodes images (was killed 3 times|can't be started)"):
            decoded(comments())
    finally:
        ended.set()
        killer.join()


def test_it_ends_with_the_process_that_asks() -> None:
    script = """
import sys, time
import numpy as np
from ddm_ray.data.prepare.decoder_process import decode_apart
print(decode_apart([b"none"], [np.zeros((1, 1, 3), np.uint8)]), flush=True)
time.sleep(1000)
"""
    asking = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert asking.stdout
    assert b"not an image" in asking.stdout.readline()
    (pid,) = decoders(asking.pid)
    asking.kill()
    asking.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 30)


def test_no_module_of_the_current_folder_is_taken_for_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "PIL.py").write_text("raise SystemExit(3)")
    script = "import numpy as np, sys; sys.path.remove(''); import ddm_ray.data.prepare.decoder_process as d;"
    script += "print(d.decode_apart([b'none'], [np.zeros((1, 1, 3), np.uint8)]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "not an image" in done.stdout, done.stderr
