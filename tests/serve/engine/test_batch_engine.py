"""The engine: rows of any requests in one batch end as they would alone, and leave when they should."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.errors import ServeError
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import ExpertCall, MixtureInfo, NetworkCall, SampleRequest, SampleResult
from ddm_ray.sampling.state import Trajectories
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.engine.batch import Pace
from ddm_ray.serve.engine.batch_engine import Answer, BatchEngine
from ddm_ray.serve.engine.runner import DeadlineError
from ddm_ray.serve.engine.scheduler import OverloadedError, Scheduler
from tests.core import closed_forms
from tests.pretend_gpu import PretendGPU
from tests.sampling.test_buckets import padded
from tests.sampling.test_joined_rows import assert_same, requests
from tests.sampling.test_waits import EXPERTS, router

SYSTEM = closed_forms.random_gaussians(seed=3, dim=2, num_experts=4, num_conditions=3)
HERE: Answer = partial(driver.answers, experts=SYSTEM.experts, router=SYSTEM.router)


@dataclass
class Clock:
    """Seconds of the tests' own, which go on when networks compute."""

    now: float = 0.0
    a_call: float = 0.0
    calls: list[Sequence[NetworkCall]] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def answer(self, calls: Sequence[NetworkCall]) -> list[Tensor]:
        self.calls.append(calls)
        self.now += self.a_call
        return HERE(calls)


@dataclass
class Unlike(Clock):
    """Experts whose rows take other times each."""

    seconds_K: Sequence[float] = (1.0, 1.0, 4.0, 10.0)

    def answer(self, calls: Sequence[NetworkCall]) -> list[Tensor]:
        self.now += sum(self.seconds_K[each.expert] * len(each.t_B) for each in calls if isinstance(each, ExpertCall))
        return HERE(calls)


def request(seed: int = 0, **changes: object) -> SampleRequest:
    return SampleRequest(
        (seed,), torch.tensor([seed % 3]), SamplingSettings(**{"strategy": "once", "steps": 5} | changes)
    )


def fresh(seed: int) -> Trajectories:
    return start(request(seed), SYSTEM.info())


def alone(asked: SampleRequest) -> SampleResult:
    return driver.sample(asked, SYSTEM.info(), SYSTEM.experts, SYSTEM.router)


def run(engine: BatchEngine) -> None:
    while engine.tick():
        pass


@settings(max_examples=40)
@given(
    data=st.data(),
    count=st.integers(1, 6),
    every=st.integers(0, 3),
    max_rows=st.sampled_from([1, 4, 32]),
    seconds=st.sampled_from([[1e9], [1e6, 1e9, 1e3]]),
)
def test_rows_end_as_they_would_alone(
    data: st.DataObject, count: int, every: int, max_rows: int, seconds: list[float]
) -> None:
    """Whoever else comes, goes, waits and makes room: some are more urgent than those that run."""
    engine = BatchEngine(HERE, scheduler=Scheduler(max_rows))
    asked = [data.draw(requests(10 * number)) for number in range(count)]
    futures = []
    for number, each in enumerate(asked):
        futures.append(engine.submit(start(each, SYSTEM.info()), seconds[number % len(seconds)]))
        for _ in range(every):
            engine.tick()
    run(engine)
    for each, future in zip(asked, futures, strict=True):
        assert future.result().rows.done_B.all() and (future.result().needed_B == -1).all()
        assert_same(future.result().rows.result(), alone(each))


def test_a_segment_ends_where_it_was_asked_to_and_goes_on_from_there() -> None:
    asked, engine = request(strategy="top-2", solver="heun", guidance_scale=2.0), BatchEngine(HERE)
    rows = start(asked, SYSTEM.info())
    for until in (3, 6, None, None):
        future = engine.submit(rows, until=until)
        run(engine)
        rows = future.result().rows
        assert rows.position_B.tolist() == [until or 9]
    assert future.result().rows.done_B.all()
    assert_same(rows.result(), alone(asked))


def test_rows_at_different_velocities_share_the_calls_of_networks() -> None:
    clock = Clock()
    engine = BatchEngine(clock.answer)
    first = engine.submit(start(request(0, strategy="full"), SYSTEM.info()))
    engine.tick()
    second = engine.submit(start(request(1, strategy="full", solver="heun", guidance_scale=3.0), SYSTEM.info()))
    clock.calls.clear()
    engine.tick()
    (router,), experts = clock.calls
    assert router.t_B.tolist() == [0.8, 1.0, 1.0]
    assert len(experts) == 4 and all(isinstance(call, ExpertCall) and len(call.t_B) == 3 for call in experts)
    run(engine)
    assert first.result().rows.done_B.all() and second.result().rows.done_B.all()


def test_whoever_cancels_has_gone_before_the_next_velocity() -> None:
    clock = Clock()
    engine = BatchEngine(clock.answer)
    stays = engine.submit(start(request(0), SYSTEM.info()))
    goes = engine.submit(start(request(1), SYSTEM.info()))
    engine.tick()
    assert goes.cancel()
    clock.calls.clear()
    engine.tick()
    assert sum(len(call.t_B) for calls in clock.calls for call in calls) == 1
    run(engine)
    assert_same(stays.result().rows.result(), alone(request(0)))
    assert not engine.tick() and engine.scheduler.rows == 0


def test_nobody_waits_beyond_a_deadline() -> None:
    clock = Clock(a_call=1.0)
    engine = BatchEngine(clock.answer, clock=clock)
    late = engine.submit(start(request(0), SYSTEM.info()), seconds=2.5)
    fine = engine.submit(start(request(1), SYSTEM.info()), seconds=100)
    run(engine)
    with pytest.raises(DeadlineError, match="out of time, 2 velocities before the end"):
        late.result()
    assert fine.result().rows.done_B.all()


def test_where_velocities_become_slower_a_request_is_given_up_for_the_others() -> None:
    clock = Clock(a_call=1.0)
    engine = BatchEngine(clock.answer, clock=clock, scheduler=Scheduler(max_rows=1))
    engine.submit(start(request(0), SYSTEM.info()))
    run(engine)
    three = [engine.submit(start(request(seed), SYSTEM.info()), seconds=25) for seed in range(3)]
    clock.a_call = 2.0
    run(engine)
    ends = [each.exception() for each in three]
    (given_up,) = [end for end in ends if end is not None]
    assert isinstance(given_up, OverloadedError) and "velocities have become slower" in str(given_up)
    assert 0 < given_up.retry_after_s < 25


def test_more_than_can_be_done_in_time_is_refused() -> None:
    clock = Clock(a_call=1.0)
    engine = BatchEngine(clock.answer, clock=clock, scheduler=Scheduler(max_rows=1))
    engine.submit(start(request(0), SYSTEM.info()))
    run(engine)
    engine.submit(start(request(1), SYSTEM.info()), seconds=11)
    with pytest.raises(OverloadedError) as refused:
        engine.submit(start(request(2), SYSTEM.info()), seconds=11)
    assert 0 < refused.value.retry_after_s < 11
    run(engine)


def test_without_a_time_a_request_has_many_times_what_it_takes_alone() -> None:
    clock = Clock(a_call=2.0)
    engine = BatchEngine(clock.answer, clock=clock)
    engine.submit(start(request(0), SYSTEM.info()))
    run(engine)
    engine.submit(start(request(1), SYSTEM.info()))
    (job,) = engine.scheduler.batch(clock.now)
    assert job.deadline - clock.now == pytest.approx(100, rel=0.01)
    run(engine)


def test_what_happens_between_velocities_is_part_of_their_time() -> None:
    clock = Clock(a_call=1.0)
    engine = BatchEngine(clock.answer, clock=clock)
    busy = engine.submit(start(request(0, steps=9), SYSTEM.info()), 1e9)
    while not busy.done():
        engine.tick()
        clock.now += 2.0
    assert engine.scheduler.speed.seconds(1) == pytest.approx(2.75, rel=0.05)
    clock.now += 1000.0  # idle
    again = engine.submit(start(request(1, steps=2), SYSTEM.info()), 1e9)
    while not again.done():
        engine.tick()
    assert engine.scheduler.speed.seconds(1) < 3


def test_calls_of_others_are_answered_in_batches_of_their_size() -> None:
    clock = Clock()
    engine = BatchEngine(clock.answer, scheduler=Scheduler(max_rows=2))
    x_BCHW = torch.randn(5, *SYSTEM.info().image_shape, dtype=torch.float64)
    t_B, label_B = torch.linspace(0.1, 0.9, 5, dtype=torch.float64), torch.arange(5) % 3
    parts = [engine.ask(ExpertCall(2, x_BCHW[n : n + 1], t_B[n : n + 1], label_B[n : n + 1])) for n in range(5)]
    engine.tick()
    assert [len(call.t_B) for (call,) in clock.calls] == [2, 2, 1]
    torch.testing.assert_close(torch.cat([part.result() for part in parts]), SYSTEM.experts[2](x_BCHW, t_B, label_B))


def test_an_engine_runs_in_a_thread_until_it_is_closed() -> None:
    held = threading.Event()

    def answer(calls: Sequence[NetworkCall]) -> list[Tensor]:
        held.wait(60)
        return HERE(calls)

    engine = BatchEngine(answer)
    engine.start()
    engine.require_running()
    first = engine.submit(fresh(1))
    held.set()
    assert_same(first.result(60).rows.result(), alone(request(1)))
    held.clear()
    second = engine.submit(request_of_many_steps())
    closing = threading.Thread(target=engine.close)
    closing.start()
    held.set()
    closing.join(60)
    with pytest.raises(ServeError, match="the server stops"):
        second.result(60)
    for refuses in (engine.require_running, lambda: engine.submit(fresh(1))):
        with pytest.raises(ServeError, match="the server stops"):
            refuses()


def request_of_many_steps() -> Trajectories:
    return start(request(2, steps=100_000), SYSTEM.info())


@pytest.mark.parametrize(("strategy", "waits"), [("once", 0), ("full", 0), ("top-1", 1), ("top-2", 1)])
@pytest.mark.parametrize(("num_requests", "in_buckets"), [(1, False), (5, False), (5, True)])
def test_a_velocity_on_a_gpu_waits_as_often_at_any_batch(
    strategy: str, waits: int, num_requests: int, in_buckets: bool
) -> None:
    """Of rows at different velocities, guided and not; the images are the CPU's."""
    info = MixtureInfo.from_counts(torch.ones(4, 5), image_shape=(1, 4, 4))
    *experts, posterior = map(padded, [*EXPERTS, router]) if in_buckets else [*EXPERTS, router]
    answer = partial(driver.answers, experts=experts, router=posterior)
    engine, futures = BatchEngine(answer), []
    asked = [request(seed, strategy=strategy, steps=12, guidance_scale=1.0 + seed % 2) for seed in range(num_requests)]
    with PretendGPU() as gpu, torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: gpu.pinned(tensor))
        for each in asked:
            futures.append(engine.submit(start(each, info, "meta")))
            engine.tick()
        before = gpu.waits.total()
        for _ in range(4):
            engine.tick()
        assert (gpu.waits.total() - before) / 4 == waits, gpu.waits
        run(engine)
        results = [future.result().rows.result() for future in futures]
    for each, result in zip(asked, results, strict=True):
        right = driver.sample(each, info, EXPERTS, router)
        torch.testing.assert_close(result.images_BCHW, right.images_BCHW)


def test_the_host_keeps_one_velocity_ahead_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = list[str]()

    class Event:
        def __init__(self) -> None:
            self.number = happened.count("made")
            happened.append("made")

        def record(self, stream: object) -> None:
            happened.append(f"recorded {self.number}")

        def synchronize(self) -> None:
            happened.append(f"waited for {self.number}")

    class OnGPU:
        is_cuda, device = True, "cuda"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    pace = Pace()
    for _ in range(3):
        pace.keep(OnGPU())
    assert [each for each in happened if each != "made"] == [
        "recorded 0",
        "recorded 1",
        "waited for 0",
        "recorded 2",
        "waited for 1",
    ]


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_time_of_rows_is_that_of_their_own_experts(scale: float) -> None:
    """Once the engine has seen each expert, it foresees the seconds of all that follow, large or small."""
    clock = Unlike()
    cost_K = np.array(clock.seconds_K) / np.mean(clock.seconds_K)
    engine = BatchEngine(clock.answer, clock=clock, cost_K=cost_K)
    for strategy, clusters in (("oracle", (0, 3, 2)), ("full", (0,)), ("top-1", (0,)), ("oracle", (3,))):
        for cluster in clusters:
            settings = SamplingSettings(strategy=strategy, steps=4, guidance_scale=scale)
            asked = SampleRequest((1, 2), torch.tensor([0, 1]), settings, torch.tensor([cluster, cluster]))
            future = engine.submit(start(asked, SYSTEM.info()), 1e9)
            (job,), began = engine.scheduler.jobs, clock.now
            if strategy != "oracle":
                engine.tick()  # only then is it known which experts the rows take
            left, foreseen = clock.now, job.velocities * engine.scheduler.speed.seconds(job.rows_each)
            run(engine)
            assert future.result().rows.done_B.all()
            if strategy in ("full", "oracle") and began:
                assert clock.now - left == pytest.approx(foreseen)
