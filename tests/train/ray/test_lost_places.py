"""Places in a Ray cluster whose owner is gone, on a real one."""

import os
from typing import Any

import ray
from ray.util.placement_group import placement_group

from ddm_ray.train.ray.recovery import free_places_of_the_dead, has_places
from tests.conftest import wait_for


def test_places_of_dead_owners_are_free_again(ray_cluster: str) -> None:
    class Owner:
        """An actor that holds one CPU by a placement group, as Ray Train's controllers hold those of their workers."""

        def hold(self) -> None:
            self.group = placement_group([{"CPU": 1}])
            ray.get(self.group.ready())

        def die(self) -> None:
            os._exit(1)

    def held() -> float:
        return ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)

    actor: Any = ray.remote(num_cpus=0)(Owner)
    owners = [actor.remote() for _ in range(2)]
    ray.get([owner.hold.remote() for owner in owners])
    wait_for(lambda: held() == 2, 30, lambda: f"{held()} CPUs are held")
    assert has_places()
    owners[0].die.remote()

    def freed() -> bool:
        free_places_of_the_dead()
        return held() < 2

    wait_for(freed, 30, lambda: f"{held()} CPUs are held")
    assert held() == 1, "that of the living stays"
    free_places_of_the_dead()
    assert held() == 1
    ray.kill(owners[1])
    wait_for(lambda: (free_places_of_the_dead(), held() == 0)[1], 30)
    assert not has_places()
