"""Experts that come when called: the same images, each fetched once where it can be, few of them at a time."""

import threading
import weakref

import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core.names import STRATEGIES
from ddm_ray.errors import SamplingError
from ddm_ray.sampling import driver
from ddm_ray.sampling.offload import OffloadedToDisk, resident_experts
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models
from tests.core import closed_forms

SYSTEM = closed_forms.random_gaussians(seed=5, dim=3, num_experts=5, num_conditions=3)
WANTED = SampleRequest(tuple(range(24)), torch.arange(24) % 3, SamplingSettings(steps=6), torch.arange(24) * 7 % 5)


class Expert:
    """A closed-form expert as an object that can be seen to go."""

    def __init__(self, field) -> None:
        self.field = field

    def __call__(self, *inputs):
        return self.field(*inputs)


class Shelf:
    """A fetch that remembers what it gave, and who is still there."""

    def __init__(self, system: closed_forms.GaussianMixture = SYSTEM) -> None:
        self.system, self.fetched, self.alive, self.most = system, [], weakref.WeakSet(), 0

    def __call__(self, expert: int) -> Expert:
        field = Expert(self.system.experts[expert])
        self.fetched.append(expert)
        self.alive.add(field)
        self.most = max(self.most, len(self.alive))
        return field


def offloaded(shelf: Shelf, resident: int = 2, num_experts: int = 5) -> OffloadedToDisk:
    return OffloadedToDisk(shelf, [True] * num_experts, resident)


@pytest.mark.parametrize("strategy", [form.example for form in STRATEGIES.values()])
@pytest.mark.parametrize("resident", [2, 5])
def test_images_are_those_of_resident_experts(strategy: str, resident: int) -> None:
    shelf, request = Shelf(), WANTED.changed(strategy=strategy, guidance_scale=1.5)
    right = Models(SYSTEM.info(), SYSTEM.experts, SYSTEM.router).sample(request)
    sampled = Models(SYSTEM.info(), offloaded(shelf, resident), SYSTEM.router).sample(request)
    torch.testing.assert_close(sampled.images_BCHW, right.images_BCHW, rtol=0, atol=1e-6)
    torch.testing.assert_close(sampled.routing_SBK, right.routing_SBK, rtol=0, atol=1e-6)
    paid = (right.num_expert_rows, right.num_router_rows)
    assert (sampled.num_expert_rows, sampled.num_router_rows) == paid
    assert shelf.most <= resident


@pytest.mark.parametrize("strategy", ["once", "oracle"])
def test_experts_that_are_held_are_fetched_once_each(strategy: str) -> None:
    shelf, request = Shelf(), WANTED.changed(strategy=strategy)
    experts = offloaded(shelf)
    sampled = Models(SYSTEM.info(), experts, SYSTEM.router).sample(request)
    assert shelf.fetched == sampled.experts_SB.unique().tolist()
    assert experts.num_fetched == len(shelf.fetched)


def test_texts_are_drawn_before_any_expert_is_fetched_and_the_router_is_paid_for() -> None:
    texts = closed_forms.Texts(closed_forms.three_gaussians())
    condition = texts.texts(torch.arange(30) % 2)
    request = SampleRequest(tuple(range(30)), condition, SamplingSettings(steps=5))
    right = Models(texts.info(), texts.experts, texts.router).sample(request)
    shelf = Shelf(texts)
    sampled = Models(texts.info(), offloaded(shelf, num_experts=3), texts.router).sample(request)
    torch.testing.assert_close(sampled.images_BCHW, right.images_BCHW, rtol=0, atol=1e-6)
    assert shelf.fetched == [0, 1, 2]
    assert sampled.num_router_rows == right.num_router_rows == 30


def test_full_begins_with_those_that_are_there() -> None:
    """So of five experts each velocity but the first fetches the three that aren't, once."""
    shelf = Shelf()
    experts = offloaded(shelf)
    driver.sample(WANTED.changed(strategy="full"), SYSTEM.info(), experts, SYSTEM.router)
    assert shelf.fetched[:8] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert experts.num_fetched == len(shelf.fetched) == 5 + 5 * 3


def test_an_expert_that_is_not_there_is_none() -> None:
    shelf = Shelf()
    experts = OffloadedToDisk(shelf, [True, False, True, True, True])
    assert len(experts) == 5
    assert experts[1] is None
    experts.prefetch(1)
    assert experts.num_fetched == 0
    sampled = Models(SYSTEM.info(), experts, SYSTEM.router).sample(WANTED.changed(strategy="once"))
    assert (sampled.experts_SB != 1).all()
    assert 1 not in shelf.fetched
    right = driver.sample(WANTED, SYSTEM.info(), [f if k != 1 else None for k, f in enumerate(SYSTEM.experts)])
    torch.testing.assert_close(sampled.images_BCHW, right.images_BCHW, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ahead", [True, False])
def test_what_fetch_raises_is_raised_at_the_call_and_may_pass(ahead: bool) -> None:
    broken = [True]

    def fetch(expert: int):
        if broken[0] and expert == 2:
            raise OSError("the disk is away")
        return SYSTEM.experts[expert]

    experts = OffloadedToDisk(fetch, [True] * 5)
    for _ in range(2):
        if ahead:
            experts.prefetch(2)
        with pytest.raises(OSError, match="the disk is away"):
            experts[2]
    assert experts[0] is SYSTEM.experts[0]
    broken[0] = False
    assert experts[2] is SYSTEM.experts[2]


@pytest.mark.parametrize("strategy", ["once", "full"])
def test_the_next_expert_comes_while_one_computes(strategy: str) -> None:
    """No expert answers before the fetch of the next has begun: one after the other this would wait in vain."""
    begun = [threading.Event() for _ in range(5)]
    waited = []

    def fetch(expert: int):
        begun[expert].set()

        def field(*inputs):
            if expert < 4:
                waited.append(begun[expert + 1].wait(timeout=20))
            return SYSTEM.experts[expert](*inputs)

        return field

    request = WANTED.changed(strategy=strategy, steps=1, solver="euler")
    request = request.changed(strategy="oracle") if strategy == "once" else request
    Models(SYSTEM.info(), OffloadedToDisk(fetch, [True] * 5), SYSTEM.router).sample(request)
    assert waited == [True] * 4


def test_the_one_unused_for_longest_makes_room() -> None:
    shelf = Shelf()
    experts = offloaded(shelf, resident=3)
    for expert in (0, 1, 2, 0, 3, 0, 2, 1):
        assert experts[expert].field is SYSTEM.experts[expert]
    assert shelf.fetched == [0, 1, 2, 3, 1]


def test_one_resident_expert_is_too_few() -> None:
    with pytest.raises(SamplingError, match="resident is 1: use 2 or more"):
        OffloadedToDisk(Shelf(), [True] * 5, resident=1)


@pytest.mark.parametrize("offload", [None, "host", "disk"])
def test_experts_are_loaded_where_they_wait_and_gaps_stay(offload: str | None) -> None:
    loaded: list[tuple[int, str]] = []

    def fetch(expert: int, where: str) -> torch.nn.Module:
        loaded.append((expert, where))
        return torch.nn.Linear(1, 1, bias=False).requires_grad_(False).to(where)

    experts = resident_experts(fetch, [True, False, True], offload, "meta")
    assert len(experts) == 3
    assert experts[1] is None
    output = experts[2](torch.zeros(1, 1, device="meta"))
    assert output.device.type == "meta"
    assert (
        loaded == {None: [(0, "meta"), (2, "meta")], "host": [(0, "cpu"), (2, "cpu")], "disk": [(2, "meta")]}[offload]
    )
