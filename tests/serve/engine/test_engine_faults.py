"""Faults in an engine: of one request, of an expert, of all; whoever isn't meant goes on as if nothing had been."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm_ray.errors import NotFiniteError, ServeError
from ddm_ray.sampling.request import ExpertCall, NetworkCall
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.runner import AwayError
from tests.sampling.test_joined_rows import assert_same
from tests.serve.engine.test_batch_engine import HERE, SYSTEM, alone, fresh, request, run


def test_an_error_at_the_end_of_one_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU what went wrong before comes out there. The others' velocities are counted once."""

    def broken(x_BCHW: Tensor) -> None:
        raise RuntimeError("CUDA error")

    engine = BatchEngine(HERE)
    short, long = engine.submit(start(request(0, steps=3), SYSTEM.info())), engine.submit(fresh(1))
    for _ in range(2):
        engine.tick()
    with monkeypatch.context() as patch:
        patch.setattr("ddm_ray.serve.engine.batch_engine.require_finite_result", broken)
        engine.tick()
    run(engine)
    with pytest.raises(RuntimeError, match="CUDA error"):
        short.result(0)
    assert_same(long.result(0).rows.result(), alone(request(1)))


def test_an_expert_that_does_not_answer_ends_those_that_need_it() -> None:
    asked = [request(seed, strategy="top-1") for seed in range(12)]
    away = int(alone(asked[0]).experts_SB[-1, 0])

    def answer(calls: Sequence[NetworkCall]) -> list[Tensor]:
        if any(isinstance(call, ExpertCall) and call.expert == away for call in calls):
            raise AwayError("it has no replica", away)
        return HERE(calls)

    engine = BatchEngine(answer)
    futures = [engine.submit(start(each, SYSTEM.info())) for each in asked]
    run(engine)
    ended = {seed for seed, future in enumerate(futures) if future.exception()}
    for seed, each in enumerate(asked):
        right = alone(each)
        assert (seed in ended) == bool((right.experts_SB == away).any())
        if seed not in ended:
            assert_same(futures[seed].result().rows.result(), right)
    assert 0 < len(ended) < len(asked)


def test_an_expert_that_only_the_branch_without_condition_needs_is_needed() -> None:
    null = SYSTEM.info().num_classes

    def answer(calls: Sequence[NetworkCall]) -> list[Tensor]:
        if any(isinstance(call, ExpertCall) and call.expert == 3 for call in calls):
            raise AwayError("it has no replica", 3)
        answers = HERE(calls)
        if not isinstance(calls[0], ExpertCall):
            answers[0][calls[0].condition != null, 3] = -torch.inf
        return answers

    engine = BatchEngine(answer)
    future = engine.submit(start(request(0, strategy="full", guidance_scale=2.0), SYSTEM.info()))
    assert engine.tick()
    with pytest.raises(AwayError):
        future.result(0)


def test_an_engine_that_nothing_succeeds_in_says_so() -> None:
    def answer(calls: Sequence[NetworkCall]) -> list[Tensor]:
        raise RuntimeError("CUDA error")

    engine = BatchEngine(answer)
    engine.start()
    engine.require_running()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            engine.submit(fresh(1)).result(60)
    with pytest.raises(ServeError, match="3 velocities in a row have failed"):
        engine.require_running()
    engine.close()


def test_one_requests_fault_is_not_the_others() -> None:
    def answer(calls: Sequence[NetworkCall]) -> list[Tensor]:
        return [HERE([call])[0] + torch.where((call.x_BCHW.abs() > 1e5)[:, :1, :1, :1], np.nan, 0.0) for call in calls]

    engine = BatchEngine(answer)
    broken = start(request(0), SYSTEM.info())
    futures = [
        engine.submit(rows) for rows in (broken.changed(x_BCHW=broken.x_BCHW * 1e9, turn=None), fresh(1), fresh(2))
    ]
    run(engine)
    with pytest.raises(NotFiniteError, match="gave a velocity that isn't finite at t = 1"):
        futures[0].result()
    for seed in (1, 2):
        assert_same(futures[seed].result().rows.result(), alone(request(seed)))


@pytest.mark.parametrize(("error", "num_calls"), [(RuntimeError("out of memory"), 4), (ServeError("nobody there"), 1)])
def test_an_error_of_all_reaches_all(error: Exception, num_calls: int) -> None:
    """After each was tried by itself, but for an error that is nobody's rows'."""
    calls_of = list[Sequence[NetworkCall]]()

    def answer(calls: Sequence[NetworkCall]) -> list[Tensor]:
        calls_of.append(calls)
        raise error

    engine = BatchEngine(answer)
    futures = [engine.submit(fresh(seed)) for seed in range(3)]
    run(engine)
    for future in futures:
        with pytest.raises(type(error), match=str(error)):
            future.result()
    assert engine.scheduler.rows == 0 and len(calls_of) == num_calls
