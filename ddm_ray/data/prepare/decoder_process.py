"""Decodes images in a separate process (`decoder`). If an image kills it, that is the reason why it can't be used."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple

import numpy as np

from ddm_ray.core.names import FitName
from ddm_ray.data.images import FITS
from ddm_ray.data.prepare.decoder import ENVIRONMENT, HEADER, MEMORY, NOT_FRESH, OUT_OF_MEMORY, READY, SECONDS, SIZE
from ddm_ray.errors import DataError
from ddm_ray.store.refusals import as_temporary_error

TOO_LARGE = f"needs more than {MEMORY >> 20} MiB to be decoded"
TOO_SLOW = f"needs more than {SECONDS} s to be decoded"
# Signals that people, and systems short of memory, send; they don't count against an image.
_KILLS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_MAX_KILLS = 3
MAX_SIDE_BY_SIDE = 8
"""Maximum idle processes that wait for the next call; further ones end after their call."""
_idle: list["_Decoder"] = []


class Answer(NamedTuple):
    """The `reason` why an image can't be used, or a `remark` on what it lost; "" if there is none."""

    reason: str
    remark: str = ""


def decode_apart(images: Sequence[bytes], pixels: Sequence[np.ndarray], fit: FitName = "crop") -> list[Answer]:
    """Decode images into contiguous `pixels`, each uint8 HWC. Returns an answer for each.

    `fit`: see `images.decode`. Each concurrent call of a thread has its own process. Some processes wait for
    the next call, and end with this process, however it ends. Raises DataError if one can't be started, or is killed
    several times; StorageError.
    """
    answers: dict[int, Answer] = {}
    left, suspect, kills = list(range(len(images))), None, 0
    while left:
        # An image's result mustn't depend on images before it, so a suspect is decoded again, alone in a fresh process.
        used = _idle_one() if suspect is None else None
        decoder, asked = (used, left) if used else (_Decoder(), left[:1])
        suspect = None
        try:
            decoder.ask([images[place] for place in asked], pixels[0].shape, fit)
            for place in asked:
                answers[place] = decoder.answer(pixels[place])
        except (EOFError, BrokenPipeError):
            suspect = asked[decoder.place]
            status, reason = decoder.end()
            kills += -status in _KILLS
            if kills == _MAX_KILLS:
                raise DataError(f"the process that decodes images was killed {kills} times; free memory") from None
            if reason and (not used or reason == TOO_SLOW):
                answers[suspect], suspect = Answer(reason), None
        except BaseException:
            decoder.close()  # its pending answers would be read as answers to the next question
            raise
        else:
            _keep(decoder)
        left = sorted((place for place in left if place not in answers), key=lambda place: place != suspect)
    return [answers[place] for place in range(len(images))]


def _idle_one() -> "_Decoder | None":
    with suppress(IndexError):
        return _idle.pop()
    return None


def _keep(decoder: "_Decoder") -> None:
    if len(_idle) < MAX_SIDE_BY_SIDE:
        _idle.append(decoder)
    else:
        decoder.close()


class _Decoder:
    """A running `decoder` process."""

    def __init__(self) -> None:
        """Start it. Raises DataError if it exits at once, StorageError if its shared file can't be written."""
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        with as_temporary_error(), tempfile.TemporaryFile() as shared:
            shared.write(bytes(SIZE.size))  # allocates the block: a hole can't be filled once the disk is full
            shared.flush()
            self._place = mmap.mmap(shared.fileno(), SIZE.size)
            self._process = subprocess.Popen(
                # -P keeps the current folder off the path: its files may have the names of modules.
                [sys.executable, "-P", "-m", "ddm_ray.data.prepare.decoder", str(shared.fileno())],
                pass_fds=[shared.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
                process_group=0,  # Ctrl-C is for the calling process
            )
        assert self._process.stdin and self._process.stdout
        self._questions: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout
        self.close = weakref.finalize(self, _end, self._process, os.getpid())
        if self._answers.read(1) != READY:
            self.end()
            raise DataError(f"the process that decodes images can't be started: {self._process.returncode}")

    def ask(self, images: Sequence[bytes], shape_HWC: Sequence[int], fit: FitName) -> None:
        """Send images. Raises BrokenPipeError if the process is dead."""
        height, width, num_channels = shape_HWC
        SIZE.pack_into(self._place, 0, 0)
        self._questions.write(HEADER.pack(num_channels, height, width, FITS.index(fit), len(images)))
        self._questions.write(b"".join(SIZE.pack(len(encoded)) for encoded in images))
        for encoded in images:
            self._questions.write(encoded)
        self._questions.flush()

    @property
    def place(self) -> int:
        """Index in the question of the image that is being decoded, or was decoded last."""
        return int(SIZE.unpack(self._place[:])[0])

    def answer(self, pixels_HWC: np.ndarray) -> Answer:
        """Read the next image into `pixels_HWC`, if it can be used, and return the answer.

        Raises EOFError if the process dies.
        """
        if reason := self._text():
            return Answer(reason)
        remark = self._text()
        memory = pixels_HWC.reshape(-1).data
        if self._answers.readinto(memory) < len(memory):  # type: ignore[attr-defined]
            raise EOFError
        return Answer("", remark)

    def end(self) -> tuple[int, str]:
        """Wait for a dead process. Returns its status, and why its image can't be used if the image is to blame."""
        status = self._process.wait()
        self.close()
        if status == NOT_FRESH or -status in _KILLS:
            return status, ""
        known = {OUT_OF_MEMORY: TOO_LARGE, -signal.SIGPROF: TOO_SLOW}
        return status, known.get(status, f"crashes its decoder ({status})")

    def _text(self) -> str:
        (size,) = SIZE.unpack(self._read(SIZE.size))
        return self._read(size).decode()

    def _read(self, size: int) -> bytes:
        data = self._answers.read(size)
        if len(data) < size:
            raise EOFError
        return data


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() == owner:  # a forked child has this object too
        process.kill()
        process.communicate()


os.register_at_fork(after_in_child=_idle.clear)
