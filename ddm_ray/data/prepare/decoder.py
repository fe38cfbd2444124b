"""A process that decodes images for another one, each within a budget of memory and time; run as a module.

It reads questions on its standard input and writes answers to its standard output, and ends when the input does: with
whoever asks, however that ended. A question is HEADER (channels, height, width, 1 to shrink, which of FITS, number of
images), SIZE of each image, and the images. The answer to each image is SIZE of a reason and the reason, which is empty
if its pixels follow. A shared file, whose descriptor is the argument, has SIZE as well: the place in the question of
the image that is decoded.
"""

import io
import mmap
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from struct import Struct

import numpy as np
from PIL import Image

from ddm_ray.core.names import FitName
from ddm_ray.data.images import FITS, FORMATS, decode, rejection
from ddm_ray.environment import quiet_pillow
from ddm_ray.memory import taken_bytes

MEMORY = 512 * 2**20
"""Bytes that an image may take with its file, beside those of the process itself."""
SECONDS = 4
"""CPU time that decoding an image may take."""
HEADER, SIZE = Struct("<6I"), Struct("<Q")
READY = b"\n"
"""Written once the process can be asked."""
OUT_OF_MEMORY, NOT_FRESH = 77, 78
"""Exit statuses: an image takes more than MEMORY; a large one is refused, by a process that had others before it.

Decoders say many things where they get no memory, and how much there is depends on what came before.
"""
ENVIRONMENT = {
    # On a machine of many cores an image takes no more memory than on others.
    **dict.fromkeys(("MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    # What an image of usual size leaves is for the next one: memory that comes from the system anew takes a third more.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
}
"""Environment of the process."""
_BUFFER, _LARGE = 2**18, 2**22
# As Pillow puts it where there is no MemoryError.
_OUT_OF_MEMORY = re.compile("out of memory|decoder error -9")


def answer_questions(place: mmap.mmap) -> None:
    """Answer until there are no more questions."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb", _BUFFER)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    sink.write(READY)
    sink.flush()
    fresh = True
    while header := source.read(HEADER.size):
        channels, height, width, shrink, fit, count = HEADER.unpack(header)
        sizes = [size for (size,) in SIZE.iter_unpack(source.read(count * SIZE.size))]
        for number, encoded in enumerate([source.read(size) for size in sizes]):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            SIZE.pack_into(place, 0, number)
            decoded = _decoded(encoded, (channels, height, width), bool(shrink), FITS[fit])
            if isinstance(decoded, bytes):
                if not fresh and _is_large(encoded):
                    os._exit(NOT_FRESH)
                sink.write(SIZE.pack(len(decoded)) + decoded)
            else:
                sink.write(SIZE.pack(0))
                sink.write(decoded.data)
            fresh = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.flush()


def _decoded(encoded: bytes, shape: tuple[int, int, int], shrink: bool, fit: FitName) -> np.ndarray | bytes:
    """Contiguous pixels_HWC, or why there are none. Raises MemoryError."""
    try:
        return decode(encoded, shape, shrink, fit)
    except Exception as error:
        # Pillow may hide it behind a SystemError.
        if MemoryError in (type(error), type(error.__cause__)) or _OUT_OF_MEMORY.match(str(error)):
            raise MemoryError from error
        return rejection(error).encode()


def _is_large(encoded: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as opened:
            return opened.width * opened.height > _LARGE
    except Exception:  # a border: what is no image to Pillow has no size, whatever its plug-ins raise
        return False


def run_decoder() -> None:
    """Take on the limits, and serve."""
    with suppress(ImportError):
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    quiet_pillow()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # not Linux
        limit, (_, allowed) = taken_bytes("VmSize") + MEMORY, resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer_questions(mmap.mmap(int(sys.argv[1]), SIZE.size))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    run_decoder()
