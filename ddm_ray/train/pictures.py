"""Pictures of what a model samples: of its published weights, and now and then of a state as training goes on.

They never cost a training: what goes wrong is a warning, and a picture is given up once training waits for it.
"""

import math
import sys
import time
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddm_ray.core.solvers import SOLVERS
from ddm_ray.memory import free_bytes
from ddm_ray.models import weights
from ddm_ray.models.adapters import trained_parameters
from ddm_ray.models.flops import num_frozen
from ddm_ray.run.manifest import read_manifest
from ddm_ray.sampling.run_models import ModelKind, settings_of
from ddm_ray.spelling import one_line
from ddm_ray.train.membership import Membership
from ddm_ray.train.preview import PER_CLASS, labels_of, picture
from ddm_ray.train.state import SavedParts
from ddm_ray.train.zero_shards import EMA

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine

# Only weights of at most so many bytes are painted, and on a GPU only if so many times their size is free.
MAX_PAINTED_BYTES, FREE_TIMES = 4 * 2**30, 4
FREE_SHARE, FREE_BYTES = 0.25, 2**30
"""Memory that has to be free for a picture of a state, for which no user has asked: a share of a GPU's, or bytes."""
SHARE = 0.01
"""Share of an attempt's time that pictures of states may take."""
FORWARD = 1 / 3
"""Cost of sampling with a row once, as a share of the cost of training on it."""
CAUTION = 2.0
"""Factor on the estimate for an attempt's first picture: its networks are loaded, and latents are decoded."""
EARLY, PARTS = 6, 8
"""Pictures are due after each eighth of the steps, and before the first one after 1/64, 1/32 and 1/16 of them."""


def marks(step: int, steps: int) -> int:
    """Number of pictures that are due in the first `step` of so many steps, if their time allows."""
    halves = sum(step * 2**power >= steps for power in range(4, EARLY + 1))
    return halves + min(PARTS - 1, PARTS * step // steps)


class Painter:
    """Paints what weights of a job can do: those of a denoiser of labels. No other job has pictures."""

    def __init__(self, membership: Membership, device: torch.device):
        self._run, self._job, self._device = membership.run, membership.job, device
        artifact = self._job.artifact
        self.paints = artifact.kind != "router" and self._run.config.data.text is None
        self._kind: ModelKind = "student" if artifact.kind == "student" else "monolith"
        self._base_bytes = 4 * num_frozen(weights.build(self._job.spec, "meta"))

    def paint(
        self, key: str, size: int, read: Callable[[], bytes], given_up: Callable[[], bool] = lambda: False
    ) -> bool:
        """Write the picture `key` of weights of `size` bytes, which `read` returns; False if that fails.

        A failure is printed as a warning. Nothing is written once the picture is `given_up`.
        """
        run = self._run
        try:
            if lack := self.lack_of_room(size):
                raise MemoryError(lack)
            png = picture(run, self._job.spec, read(), self._job.artifact.cluster, self._device, self._kind, given_up)
            if png is not None:
                run.store.write(key, png)
        except Exception as error:  # any error: a picture must not cost the weights
            _warn(key, error)
            return False
        finally:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # training may need what sampling has reserved
        return True

    def lack_of_room(self, size: int, free_share: float = 0.0) -> str:
        """Why weights of so many bytes aren't painted: for want of memory, of which a share has to be free, if any.

        The base of an adapter is loaded, too.
        """
        size += self._base_bytes
        if size > MAX_PAINTED_BYTES:
            return "so large a model isn't painted beside training"
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return "" if free >= max(FREE_TIMES * size, free_share * total) else "training leaves too little GPU memory"
        if free_share and free_bytes() < max(FREE_TIMES * size, FREE_BYTES):
            return "training leaves too little memory"
        return ""

    def num_velocities(self) -> int:
        """Number of times that the network is called with a row for a picture."""
        settings = settings_of(self._run, self._kind)
        guided = 2 if settings.guidance_scale != 1 else 1
        rows = PER_CLASS * len(labels_of(self._run, self._job.artifact.cluster))
        return rows * settings.steps * SOLVERS[settings.solver].evaluations * guided


class Pictures:
    """Paints some of an attempt's states, in the thread that commits them.

    Pictures take a SHARE of the attempt's time at most, as far as that can be told before.
    """

    def __init__(self, membership: Membership, engine: "Engine", painter: Painter, on: bool, first: int):
        """`on`: the placement's choice. `first`: the step that the attempt continues from."""
        self._attempt, self._job, self._buffers = membership.attempt, membership.job, engine.buffers
        self._painter, self._on, self._first = painter, on and painter.paints, first
        self._passed = marks(first, membership.job.train.steps)
        self._began, self._spent, self._last = time.monotonic(), 0.0, 0.0
        self._rows = membership.job.batch / dist.get_world_size()  # of a step, in this process
        self._closed = Event()

    def close(self) -> None:
        """Give up the picture that is being painted, if there is one, and paint no more."""
        self._closed.set()

    def after_state(self, step: int) -> None:
        """Paint the committed state of this step, if a picture is due and its time allows. Never raises."""
        due = marks(step, self._job.train.steps)
        if not self._on or due <= self._passed or self._closed.is_set():
            return
        began = time.monotonic()
        try:
            if not self._affordable(step):
                return
            # After a failure no more: one warning is enough.
            self._on = self._paint(step)
        except Exception as error:  # any error: training goes on without pictures
            _warn(self._attempt.picture_key(step), error)
            self._on = False
        self._passed, self._last = due, time.monotonic() - began
        self._spent += self._last

    def _paint(self, step: int) -> bool:
        store, prefix = self._attempt.store, self._attempt.state_prefix(step)
        own = trained_parameters(weights.build(self._job.spec, "meta"))
        shapes = {name: tuple(each.shape) for name, each in own.items()}
        size = 4 * sum(math.prod(shape) for shape in shapes.values())

        def read() -> bytes:
            saved = SavedParts(store, prefix, read_manifest(store, prefix))
            return b"".join(saved.consolidated(EMA, shapes, self._buffers))

        if self._painter.lack_of_room(size, FREE_SHARE):
            return True  # there may be room later
        return self._painter.paint(self._attempt.picture_key(step), size, read, self._closed.is_set)

    def _affordable(self, step: int) -> bool:
        seconds = time.monotonic() - self._began
        if not self._last:
            row_seconds = FORWARD * seconds / max(1.0, (step - self._first) * self._rows)
            return CAUTION * self._painter.num_velocities() * row_seconds <= SHARE * seconds
        return self._spent + self._last <= SHARE * seconds


def _warn(key: str, error: Exception) -> None:
    print(f"warning: {key}: no picture: {one_line(error, 300)}", file=sys.stderr)
