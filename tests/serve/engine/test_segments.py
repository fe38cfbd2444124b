"""Rows that go from engine to engine: the pipeline's images, few calls, and what is left out when an expert is away."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.config import SamplingSettings
from ddm_ray.sampling import driver
from ddm_ray.sampling.plan import SamplingPlan
from ddm_ray.sampling.request import MixtureInfo, SampleRequest, SampleResult
from ddm_ray.sampling.serialization import pack, unpack
from ddm_ray.sampling.state import Trajectories
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.local_runner import LocalRunner
from ddm_ray.serve.engine.runner import AwayError, Segment
from ddm_ray.serve.engine.segments import Sampled, SegmentSampler, first_expert_B
from tests.core import closed_forms
from tests.sampling.test_joined_rows import assert_same, requests

pytestmark = pytest.mark.contract

SYSTEM = closed_forms.random_gaussians(seed=3, dim=2, num_experts=4, num_conditions=3)
INFO = SYSTEM.info()
K = INFO.num_experts


class Elsewhere:
    """An engine whose rows cross as bytes; `away`: nobody answers."""

    def __init__(self, engine: BatchEngine, expert: int, away: bool):
        self._engine, self._expert, self._away = LocalRunner(engine), expert, away
        self.away = False

    async def run(self, rows: Trajectories, seconds: float | None, until: int | None) -> Segment:
        if self._away:
            raise AwayError(f"expert {self._expert} has no replica", self._expert)
        segment = await self._engine.run(unpack(pack(rows), INFO), seconds, until)
        return replace(segment, rows=unpack(pack(segment.rows), INFO))


def count_segments(sampler: SegmentSampler) -> list[tuple[int, int, int]]:
    """The list that the sampler tells of its segments from now on: expert, velocities, rows that left."""
    counted = list[tuple[int, int, int]]()
    sampler._on_segment = lambda *values: counted.append(values[:3])
    return counted


@contextmanager
def per_expert(info: MixtureInfo = INFO, away: frozenset[int] = frozenset()) -> Iterator[SegmentSampler]:
    """An engine for each expert, and one that mixes."""
    engines = []
    for expert in range(K):
        experts = [network if number == expert else None for number, network in enumerate(SYSTEM.experts)]
        engines.append(
            BatchEngine(partial(driver.answers, experts=experts, router=SYSTEM.router), np.arange(K) == expert)
        )
    mixing = BatchEngine(partial(driver.answers, experts=SYSTEM.experts, router=SYSTEM.router))
    for engine in (*engines, mixing):
        engine.start()
    runners = [Elsewhere(engine, expert, expert in away) for expert, engine in enumerate(engines)]
    try:
        yield SegmentSampler(info, runners, LocalRunner(mixing))
    finally:
        for engine in (*engines, mixing):
            engine.close()


def alone(asked: SampleRequest, info: MixtureInfo = INFO, away: frozenset[int] = frozenset()) -> SampleResult:
    experts = [None if number in away else network for number, network in enumerate(SYSTEM.experts)]
    return driver.sample(asked, info, experts, SYSTEM.router)


def request(count: int = 1, **changes: object) -> SampleRequest:
    chosen = SamplingSettings(**{"strategy": "once", "steps": 6} | changes)
    return SampleRequest(tuple(range(count)), torch.arange(count) % 3, chosen)


@settings(max_examples=25)
@given(data=st.data(), count=st.integers(1, 4), table=st.booleans())
def test_images_are_the_pipelines_whatever_way_they_took(data: st.DataObject, count: int, table: bool) -> None:
    info = INFO if table else replace(INFO, prior_CK=None)
    asked = [data.draw(requests(10 * number)) for number in range(count)]

    async def together(sampler: SegmentSampler) -> list[Sampled]:
        return await asyncio.gather(*(sampler.sample(each) for each in asked))

    with per_expert(info) as sampler:
        for each, sampled in zip(asked, asyncio.run(together(sampler)), strict=True):
            assert_same(sampled.result, alone(each, info))
            assert not sampled.away


@pytest.mark.parametrize("strategy", ["once", "oracle"])
def test_held_experts_are_one_segment_each(strategy: str) -> None:
    asked = replace(request(6, strategy=strategy), cluster_B=torch.arange(6) % 3)
    with per_expert() as sampler:
        counted = count_segments(sampler)
        sampled = asyncio.run(sampler.sample(asked))
    used = len(np.unique(sampled.result.experts_SB.numpy()))
    assert used > 1 and len(counted) == used


def test_a_switch_is_one_segment_more() -> None:
    with per_expert() as sampler:
        for seed in range(8):
            asked = replace(request(strategy="top-1", steps=20), seeds=(seed,))
            counted = count_segments(sampler)
            sampled = asyncio.run(sampler.sample(asked))
            experts_S = sampled.result.experts_SB[:, 0].numpy()
            begun = experts_S[0] != first_expert_B(start(asked, INFO))[0]
            assert len(counted) == 1 + begun + (np.diff(experts_S) != 0).sum()


def test_what_it_counts_says_the_expert_its_velocities_and_who_left() -> None:
    with per_expert() as sampler:
        counted = count_segments(sampler)
        asked = request(strategy="top-1", steps=20)
        asyncio.run(sampler.sample(asked))
        assert sum(velocities for _, velocities, _ in counted) == 20
        assert [left for _, _, left in counted] == [1] * (len(counted) - 1) + [0]
        counted.clear()
        asyncio.run(sampler.sample(request(strategy="full")))
        assert counted == [(-1, 6, 0)]


def test_only_the_first_segment_of_a_request_tells_how_long_it_waited() -> None:
    with per_expert() as sampler:
        waited = list[float | None]()
        sampler._on_segment = lambda *values: waited.append(values[3])
        asyncio.run(sampler.sample(request(strategy="top-1", steps=20), stops=[5, 10]))
        assert len(waited) > 2 and waited[1:] == [None] * (len(waited) - 1)
        assert waited[0] is not None and 0 <= waited[0] < 60


@pytest.mark.parametrize("strategy", ["once", "top-1", "full"])
def test_an_image_is_seen_on_its_way(strategy: str) -> None:
    """At the steps that were named, as x - t v, which is the image itself at the end, with the routing so far."""
    asked, seen = request(2, strategy=strategy, solver="heun", steps=8), list[SampleResult]()
    stops = SamplingPlan.of(asked.settings, INFO).stops(3)

    async def look(foreseen: SampleResult) -> None:
        seen.append(foreseen)

    with per_expert() as sampler:
        sampled = asyncio.run(sampler.sample(asked, stops=stops, on_stop=look))
    right = alone(asked)
    assert_same(sampled.result, right)
    distances = [float((each.images_BCHW - right.images_BCHW).abs().max()) for each in seen]
    assert stops == (4, 8, 12) and len(seen) == 3
    for num_steps, each in zip((2, 4, 6), seen, strict=True):
        assert torch.equal(each.routing_SBK, right.routing_SBK[:num_steps])
    assert distances[2] < distances[0] and distances[2] > 0


@pytest.mark.parametrize("strategy", ["once", "top-1", "sticky", "sample-1"])
@pytest.mark.parametrize("num_away", [1, 3])
def test_experts_that_are_away_are_left_out_and_named(strategy: str, num_away: int) -> None:
    """The image is the one that the remaining experts always make of this seed."""
    asked = request(8, strategy=strategy)
    used = np.unique(alone(asked).experts_SB.numpy()).tolist()
    away = frozenset([*used, *(set(range(K)) - set(used))][:num_away])
    with per_expert(away=away) as sampler:
        sampled = asyncio.run(sampler.sample(asked))
    assert used[0] in sampled.away and sampled.away <= away
    assert_same(sampled.result, alone(asked, away=sampled.away))
    assert not set(np.unique(sampled.result.experts_SB.numpy())) & away


@pytest.mark.parametrize("strategy", ["full", "top-2", "top-1"])
def test_the_last_expert_paints_alone_and_is_seen_once_at_each_stop(strategy: str) -> None:
    asked, seen = request(3, strategy=strategy), list[SampleResult]()

    async def look(foreseen: SampleResult) -> None:
        seen.append(foreseen)

    for last in range(K):
        seen.clear()
        away = frozenset(range(K)) - {last}
        with per_expert(away=away) as sampler:
            for expert in away:
                sampler._of_expert[expert].away = True
            sampled = asyncio.run(asyncio.wait_for(sampler.sample(asked, stops=(2, 4), on_stop=look), 60))
        assert_same(sampled.result, alone(asked, away=away))
        assert len(seen) == 2


def test_where_nobody_would_be_left_those_are_asked_that_were_away_not_long_ago() -> None:
    """Their replicas may be back already."""
    asked = request(4, strategy="full")
    for really in range(K):
        with per_expert(away=frozenset({really})) as sampler:
            for runner in sampler._of_expert:
                runner.away = True
            sampler._of_expert[really].away = False
            sampled = asyncio.run(sampler.sample(asked))
        assert sampled.away == {really}
        assert_same(sampled.result, alone(asked, away=sampled.away))


def test_without_any_expert_there_is_no_image() -> None:
    with per_expert(away=frozenset(range(K))) as sampler, pytest.raises(AwayError, match="no expert has a replica"):
        asyncio.run(sampler.sample(request(strategy="top-1")))


def test_who_gives_up_leaves_every_engine() -> None:
    async def given_up(sampler: SegmentSampler) -> None:
        asked = asyncio.ensure_future(sampler.sample(request(6, steps=100_000)))
        while not any(runner._engine._engine.batch_rows for runner in sampler._of_expert):
            await asyncio.sleep(0.001)
        asked.cancel()
        await asyncio.wait([asked])
        while any(runner._engine._engine.scheduler.rows for runner in sampler._of_expert):
            await asyncio.sleep(0.001)

    with per_expert() as sampler:
        asyncio.run(asyncio.wait_for(given_up(sampler), 60))
