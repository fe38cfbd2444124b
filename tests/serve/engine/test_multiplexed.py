"""Engines that share a device: the pipeline's images, few swaps, and faults that stay where they are."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddm_ray.errors import ServeError
from ddm_ray.sampling import driver
from ddm_ray.sampling.device_slots import DeviceSlot
from ddm_ray.sampling.packed_weights import PackedWeights
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.local_runner import LocalRunner
from ddm_ray.serve.engine.multiplexer import Multiplexer
from ddm_ray.serve.engine.runner import DeadlineError, ExpertError
from ddm_ray.serve.engine.scheduler import OverloadedError
from ddm_ray.serve.engine.segments import Sampled, SegmentSampler
from ddm_ray.serve.http.meters import Meters
from tests.pretend_streams import pretended
from tests.sampling.test_device_slots import EXPERTS, INFO, K, offloaded, request, router
from tests.sampling.test_joined_rows import requests
from tests.serve.engine.test_batch_engine import Clock

pytestmark = pytest.mark.contract

GREY = 1 / 127.5


def multiplexer(resident: int = 2, device: str = "cpu", **others: object) -> Multiplexer:
    return Multiplexer(offloaded(device, resident), router, **others)


def of(engines: Multiplexer) -> SegmentSampler:
    return SegmentSampler(INFO, [LocalRunner(engine) for engine in engines.of_expert], LocalRunner(engines.mixing))


@contextmanager
def running(engines: Multiplexer) -> Iterator[SegmentSampler]:
    engines.start()
    try:
        yield of(engines)
    finally:
        engines.close()


def sampled(sampler: SegmentSampler, asked: Sequence[SampleRequest]) -> list[Sampled | BaseException]:
    async def together() -> list[Sampled | BaseException]:
        return await asyncio.gather(*(sampler.sample(each) for each in asked), return_exceptions=True)

    return asyncio.run(together())


def assert_the_pipelines(asked: SampleRequest, images_BCHW: Tensor) -> None:
    right = driver.sample(asked, INFO, EXPERTS, router)
    assert (images_BCHW.clamp(-1, 1) - right.images_BCHW.clamp(-1, 1)).abs().max() < GREY


def one(seed: int, strategy: str = "once", **others: object) -> SampleRequest:
    asked = request(strategy).rows(slice(seed % 6, seed % 6 + 1)).changed(**others)
    return SampleRequest((seed,), asked.condition, asked.settings, asked.cluster_B)


def run(engines: Multiplexer) -> None:
    while engines.tick():
        pass


@settings(max_examples=25)
@given(data=st.data(), count=st.integers(1, 5), resident=st.sampled_from([2, 3, K, K + 3]))
def test_images_are_the_pipelines(data: st.DataObject, count: int, resident: int) -> None:
    """Of any strategies at once, those that mix experts among them."""
    asked = [data.draw(requests(10 * number)) for number in range(count)]
    engines = multiplexer(resident)
    with running(engines) as sampler:
        for each, result in zip(asked, sampled(sampler, asked), strict=True):
            assert isinstance(result, Sampled), result
            assert_the_pipelines(each, result.result.images_BCHW)
    assert resident < K or engines.swaps_K.max() <= 1


def test_many_images_share_a_swap() -> None:
    """One after the other, nearly every image needs one; here those of an expert run together."""
    engines = multiplexer()
    asked = [one(seed) for seed in range(60)]
    futures = []
    for each in asked:
        rows = start(each, INFO)
        futures.append(engines.of_expert[int(rows.weights_BK.argmax())].submit(rows, 1e6))
    run(engines)
    for each, future in zip(asked, futures, strict=True):
        assert_the_pipelines(each, future.result().rows.result().images_BCHW)
    assert engines.swaps_K.tolist() == [1] * K
    alone = offloaded()
    for each in asked:
        driver.sample(each, INFO, alone, router)
    assert alone.num_fetched > 20


@pytest.mark.parametrize("strategy", ["once", "full"])
def test_a_velocity_on_a_gpu_waits_for_nothing_whoever_computes(strategy: str) -> None:
    """Swaps among them; and nobody reads too early."""
    velocities, waits = [], []
    for steps in (2, 4):
        with pretended() as gpu, torch.inference_mode():
            engines, asked = multiplexer(device="meta"), [one(seed, strategy, steps=steps) for seed in range(5)]
            futures = []
            for each in asked:
                rows = start(each, INFO, "meta")
                expert = int(rows.weights_BK.argmax())
                engine = engines.mixing if strategy == "full" else engines.of_expert[expert]
                futures.append(engine.submit(rows, 1e6))
            run(engines)
            assert engines.swaps_K.sum() > 2 and not gpu.races
            velocities.append(engines.num_velocities)
            waits.append(gpu.waits.total())
            for each, future in zip(asked, futures, strict=True):
                assert_the_pipelines(each, future.result().rows.x_BCHW.inner)
    assert velocities[1] > velocities[0] and waits[1] == waits[0], gpu.waits


def test_a_fetch_that_fails_ends_those_that_need_that_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, fetch = multiplexer(), DeviceSlot.fetch
    asked = [one(seed) for seed in range(20)] + [one(seed, "full") for seed in range(20, 22)]
    broken = engines._experts.packed[2].block

    def failing(place: DeviceSlot, form: PackedWeights, source: Tensor) -> object:
        if source is broken:
            raise RuntimeError("CUDA error")
        return fetch(place, form, source)

    with monkeypatch.context() as patch, running(engines) as sampler:
        patch.setattr(DeviceSlot, "fetch", failing)
        results = sampled(sampler, asked)
        for each, result in zip(asked, results, strict=True):
            right = driver.sample(each, INFO, EXPERTS, router)
            if bool(right.routing_SBK[:, :, 2].any()):
                assert isinstance(result, ExpertError) and result.expert == 2
                assert str(result) == "the weights of expert 2 don't come: RuntimeError"
            else:
                assert isinstance(result, Sampled)
                assert_the_pipelines(each, result.result.images_BCHW)
        assert {type(result) for result in results} == {ExpertError, Sampled}
        patch.undo()
        engines.require_running()
        (again,) = sampled(sampler, [asked[-1]])
        assert isinstance(again, Sampled)
        assert_the_pipelines(asked[-1], again.result.images_BCHW)


def test_one_computes_while_the_next_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = multiplexer()
    rows = [start(one(expert, "oracle", steps=100), INFO) for expert in range(2)]
    engines.of_expert[0].submit(rows[0], 1e6)
    engines.tick()
    engines.of_expert[1].submit(rows[1], 1e3)
    with monkeypatch.context() as patch:
        patch.setattr(engines._experts, "arrived", lambda expert: expert == 0)
        for _ in range(5):
            engines.tick()
        assert engines._experts.here == [1, 0]
    assert [engine.num_velocities for engine in engines.of_expert[:2]] == [6, 0]
    engines.tick()
    assert [engine.num_velocities for engine in engines.of_expert[:2]] == [6, 1]


def test_whose_time_is_over_or_who_has_gone_leaves_though_others_have_their_turn() -> None:
    clock = Clock()
    engines = multiplexer(clock=clock)
    rows = [start(one(expert, "oracle", steps=100), INFO) for expert in range(4)]
    stays = [engines.of_expert[expert].submit(rows[expert], 1e9) for expert in range(2)]
    for _ in range(3):
        engines.tick()
    late, gone = (engines.of_expert[expert].submit(rows[expert], seconds) for expert, seconds in ((2, 50.0), (3, 1e9)))
    engines.tick()
    assert not late.done() and engines.of_expert[2].scheduler.rows == engines.of_expert[3].scheduler.rows == 1
    clock.now = 51.0
    gone.cancel()
    engines.tick()
    with pytest.raises(DeadlineError, match="out of time, 100 velocities before the end"):
        late.result(0)
    assert engines.of_expert[3].scheduler.rows == 0 and not any(future.done() for future in stays)


def test_engines_without_work_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be hundreds of them, beside the few that have some."""
    left, leave = list[BatchEngine](), BatchEngine.leave
    monkeypatch.setattr(BatchEngine, "leave", lambda engine: left.append(engine) or leave(engine))
    engines = multiplexer()
    futures = [engines.of_expert[expert].submit(start(one(expert, "oracle"), INFO), 1e9) for expert in range(2)]
    run(engines)
    assert all(future.done() for future in futures) and set(left) == set(engines.of_expert[:2])
    assert not engines.tick() and engines.slots.jobs == []


def test_more_than_all_engines_can_do_is_refused() -> None:
    clock = Clock()
    engines = multiplexer(clock=clock)
    for _ in range(30):
        engines.of_expert[0].scheduler.speed.ran(1, 1.0)
    rows = [start(one(expert, "oracle", steps=10), INFO) for expert in range(K)]
    for expert in range(3):
        engines.of_expert[expert].submit(rows[expert], 110.0)  # 20 s each
    with pytest.raises(OverloadedError):
        engines.of_expert[3].submit(rows[3], 100.0)
    engines.of_expert[3].submit(rows[3], 200.0)


def test_what_it_counts_is_told() -> None:
    engines = multiplexer()
    meters = Meters(lambda: engines)
    with running(engines) as sampler:
        (result,) = sampled(sampler, [one(0, "full")])
    assert isinstance(result, Sampled)
    page = meters.page().decode()
    values = {
        line.partition(" ")[0]: float(line.partition(" ")[2]) for line in page.splitlines() if not line.startswith("#")
    }
    # Five experts in two slots: the first velocity brings all, each of the others three.
    assert sum(values[f'ddm_swaps_total{{expert="expert-{k:03d}"}}'] for k in range(K)) == 5 + 3 * 3
    assert all(values[f'ddm_swap_wait_seconds_total{{expert="expert-{k:03d}"}}'] > 0 for k in range(K))
    assert values["ddm_velocities"] == engines.num_velocities == 4 and values["ddm_batch_rows"] == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_breaks_leaves_nobody_waiting() -> None:
    engines = multiplexer()
    engines.slots.next = lambda *_: 1 / 0
    engines.start()
    future = engines.mixing.submit(start(one(1), INFO))
    with pytest.raises(ServeError, match="the server stops"):
        future.result(60)
    engines._thread.join(60)
    with pytest.raises(ServeError, match="the server stops"):
        engines.require_running()
