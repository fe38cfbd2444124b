"""Notices that a worker has to save a state and leave: its node is preempted, or there is room for one more worker."""

import threading
import time

import ray
import ray.train
from ray.util.placement_group import placement_group, remove_placement_group

from ddm_ray.placement import TrainPlacement

# Seconds between two questions of each rank to Ray: is a node about to go?
NOTICE_SECONDS = 2.0
# Seconds between two looks of rank 0 for room. It has to find room twice in a row, since Ray's elastic policy, which
# then chooses the number of workers, looks at the nodes each 20 s.
ROOM_SECONDS = 25.0
# Seconds that Ray may take to place one more worker where room seems to be.
PLACING_SECONDS = 5.0


class WorkerDrained(Exception):
    """Raised by a worker that saved a state and left because it was asked to; Ray Train then starts a new group."""


class LeaveNotice:
    """Says at each step of the training loop whether this worker has to save a state and leave.

    A call costs microseconds and waits for nothing. Ranks may get the notice at different steps, so that they have to
    agree. A thread asks Ray: `ray.train.get_preemption_info` waits until all ranks have called it.
    """

    def __init__(self, placement: TrainPlacement):
        self._asked, self._leave = placement.asked, threading.Event()
        context = ray.train.get_context()
        self._may_grow = context.get_world_rank() == 0 and context.get_world_size() < placement.workers.max
        threading.Thread(target=self._listen, daemon=True).start()

    def __call__(self) -> bool:
        return self._leave.is_set()

    def _listen(self) -> None:
        looks, next_look = 0, time.monotonic() + ROOM_SECONDS
        while ray.train.get_preemption_info() is None:
            if self._may_grow and time.monotonic() >= next_look:
                looks = looks + 1 if has_room_for_one_more(self._asked) else 0
                if looks == 2:
                    break
                next_look = time.monotonic() + ROOM_SECONDS
            time.sleep(NOTICE_SECONDS)
        self._leave.set()


def has_room_for_one_more(asked: dict[str, float]) -> bool:
    """True if a node of the connected Ray cluster has these resources free, by placing a group of one for a moment."""
    try:
        free = ray.available_resources()
        if any(free.get(name, 0.0) < amount - 1e-6 for name, amount in asked.items()):
            return False  # a placement group for missing resources would make an autoscaler start nodes
        group = placement_group([asked])
        try:
            return group.wait(PLACING_SECONDS)
        finally:
            remove_placement_group(group)
    except Exception:  # a busy GCS may answer anything: the next look counts
        return False
