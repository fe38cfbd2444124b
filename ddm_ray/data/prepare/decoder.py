"""A process that decodes images for another, each within a budget of memory and time; run as a module.

It reads questions from its standard input and writes answers to its standard output. It exits when its input ends, so
it never outlives the process that asks. A question is HEADER (channels, height, width, index in FITS, number of
images), the SIZE of each image, and the images. The answer for each image is the SIZE of a reason, and the reason; an
empty reason is followed by the SIZE of a remark, the remark, and the pixels. The argument is the descriptor of a shared
file, in which the process writes the number of the current image within the question, as SIZE.
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
"""Bytes that an image with its file may take beyond the process itself."""
SECONDS = 4
"""CPU seconds for decoding an image."""
HEADER, SIZE = Struct("<5I"), Struct("<Q")
READY = b"\n"
"""Written when the process is ready for questions."""
OUT_OF_MEMORY, NOT_FRESH = 77, 78
"""Exit statuses: an image takes more than MEMORY; a process that has decoded before can't decode a large image.

Decoders fail in many ways without memory, and how much is left depends on earlier images. The caller tries that image
again in a fresh process.
"""
ENVIRONMENT = {
    # Keeps memory per image the same on machines with many cores.
    **dict.fromkeys(("MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    # Keeps the memory of images of usual size for the next: returning it to the system takes a third more time.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
}
"""Environment of the process."""
_BUFFER, _LARGE = 2**18, 2**22
# Pillow's messages if memory runs out without a MemoryError.
_OUT_OF_MEMORY = re.compile("out of memory|decoder error -9")


def answer_questions(place: mmap.mmap) -> None:
    """Answer questions until the input ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb", _BUFFER)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps a library's prints out of the answers
    sink.write(READY)
    sink.flush()
    fresh = True
    while header := source.read(HEADER.size):
        channels, height, width, fit, count = HEADER.unpack(header)
        sizes = [size for (size,) in SIZE.iter_unpack(source.read(count * SIZE.size))]
        for number, encoded in enumerate([source.read(size) for size in sizes]):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            SIZE.pack_into(place, 0, number)
            decoded = _decoded(encoded, (channels, height, width), FITS[fit])
            if isinstance(decoded, bytes):
                if not fresh and _is_large(encoded):
                    os._exit(NOT_FRESH)
                sink.write(SIZE.pack(len(decoded)) + decoded)
            else:
                pixels_HWC, remark = decoded
                sink.write(SIZE.pack(0) + SIZE.pack(len(remark)) + remark)
                sink.write(pixels_HWC.data)
            fresh = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.flush()


def _decoded(encoded: bytes, shape: tuple[int, int, int], fit: FitName) -> tuple[np.ndarray, bytes] | bytes:
    """Contiguous pixels_HWC and a remark on what they lost, or the reason why there are none. Raises MemoryError."""
    remarks: list[str] = []
    try:
        return decode(encoded, shape, fit, remarks), "; ".join(remarks).encode()
    except Exception as error:
        # Pillow may hide a MemoryError behind a SystemError.
        if MemoryError in (type(error), type(error.__cause__)) or _OUT_OF_MEMORY.match(str(error)):
            raise MemoryError from error
        return rejection(error).encode()


def _is_large(encoded: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as opened:
            return opened.width * opened.height > _LARGE
    except Exception:  # whatever a plug-in raises: an image that Pillow can't open has no size
        return False


def run_decoder() -> None:
    """Set the limits, then answer questions."""
    with suppress(ImportError):
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    quiet_pillow()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # /proc exists only on Linux
        limit, (_, allowed) = taken_bytes("VmSize") + MEMORY, resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer_questions(mmap.mmap(int(sys.argv[1]), SIZE.size))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    run_decoder()
