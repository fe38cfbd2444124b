"""Notices that a worker is to save a state and leave: a node goes, or there is room for one more worker."""

import threading
import time

import ray
import ray.train
from ray.util.placement_group import placement_group, remove_placement_group

from ddm_ray.placement import TrainPlacement

# How often all ranks ask whether a node is to be taken away.
NOTICE_SECONDS = 2.0
# How often rank 0 looks for room, which it must find twice in a row: Ray's elastic policy, which picks the number of
# workers, looks at the nodes each 20 s.
ROOM_SECONDS = 25.0
# Limit on how long Ray may take to find a node for one more worker that seems to have room.
PLACING_SECONDS = 5.0


class WorkerDrained(Exception):
    """Raised by a worker that saved a state and left because it was asked to; Ray Train then starts a new group."""


class LeaveNotice:
    """Says, when called by the training loop at each step, whether this worker is to save a state and leave.

    A call costs microseconds and waits for nothing; ranks may hear it at different steps and have to agree. Ray is
    asked by a thread: `ray.train.get_preemption_info` waits until all ranks have called it.
    """

    def __init__(self, placement: TrainPlacement):
        self._asked, self._leave = placement.asked, threading.Event()
        context = ray.train.get_context()
        size = context.get_world_size()
        self._may_grow = context.get_world_rank() == 0 and size < placement.workers.max
        threading.Thread(target=self._listen, daemon=True).start()

    def __call__(self) -> bool:
        return self._leave.is_set()

    def _listen(self) -> None:
        room, next_look = 0, time.monotonic() + ROOM_SECONDS
        while ray.train.get_preemption_info() is None:
            if self._may_grow and time.monotonic() >= next_look:
                room = room + 1 if has_room_for_one_more(self._asked) else 0
                if room == 2:
                    break
                next_look = time.monotonic() + ROOM_SECONDS
            time.sleep(NOTICE_SECONDS)
        self._leave.set()


def has_room_for_one_more(asked: dict[str, float]) -> bool:
    """True if a node of the connected Ray cluster has these resources free, by placing a group of one for a moment."""
    free = ray.available_resources()
    if any(free.get(name, 0.0) < amount - 1e-6 for name, amount in asked.items()):
        return False  # asking for what isn't there would have an autoscaler start nodes
    group = placement_group([asked])
    try:
        return group.wait(PLACING_SECONDS)
    finally:
        remove_placement_group(group)
