"""Rows of any requests in one state: wherever each is, it goes on as it would have alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Text
from ddm_ray.core.solvers import SOLVERS
from ddm_ray.errors import SamplingError
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import ExpertCall, MixtureInfo, SampleRequest, SampleResult
from ddm_ray.sampling.serialization import pack, pack_call, unpack, unpack_call
from ddm_ray.sampling.state import Trajectories
from ddm_ray.sampling.trajectory import advance, next_calls, start, turned
from tests.core import closed_forms
from tests.sampling.test_trajectory import EVERY

pytestmark = pytest.mark.contract

SYSTEM = closed_forms.random_gaussians(seed=3, dim=2, num_experts=4, num_conditions=3)


@st.composite
def requests(draw: st.DrawFn, first_seed: int) -> SampleRequest:
    """Any strategy, solver, steps, guidance, number of images and their labels."""
    count = draw(st.integers(1, 3))
    low, high = sorted(draw(st.tuples(st.sampled_from([0.0, 0.3]), st.sampled_from([0.6, 1.0]))))
    chosen = SamplingSettings(
        strategy=draw(st.sampled_from(EVERY)),
        solver=draw(st.sampled_from(sorted(SOLVERS))),
        steps=draw(st.integers(1, 5)),
        times=draw(st.sampled_from(["uniform", "cosine", "shifted-3"])),
        guidance_scale=draw(st.sampled_from([0.0, 1.0, 1.0, 2.5])),
        guidance_interval=(low, high),
        guidance_kind=draw(st.sampled_from(["mixture", "per-expert"])),
        router_temperature=draw(st.sampled_from([1.0, 1.7])),
    )
    label_B = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    cluster_B = torch.arange(count) % 4 if chosen.strategy == "oracle" else None
    return SampleRequest(tuple(range(first_seed, first_seed + count)), label_B, chosen, cluster_B)


def answers(state: Trajectories) -> list[torch.Tensor]:
    return driver.answers(next_calls(state), SYSTEM.experts, SYSTEM.router)


def one_velocity(state: Trajectories) -> Trajectories:
    """Every row by one velocity, the router asked before where it has to be."""
    assert state.turn is not None
    if state.turn.chosen is None:
        state = advance(state, answers(state))
    return advance(state, answers(state))


def sampled_together(asked: Sequence[SampleRequest], infos: Sequence[MixtureInfo], every: int) -> list[SampleResult]:
    """Each request joins `every` velocities after the one before, and leaves when it is done."""
    results: dict[int, SampleResult] = {}
    waiting, running, tick = list(enumerate(asked)), None, 0
    number_of = {seed: number for number, request in waiting for seed in request.seeds}
    while waiting or running is not None:
        if waiting and (running is None or tick % every == 0):
            parts = [] if running is None else [running]
            number, request = waiting.pop(0)
            running = turned(Trajectories.joined([*parts, start(request, infos[number])]))
        running, tick = one_velocity(running), tick + 1
        if running.done_B.any():
            done, left = running.rows(running.done_B), ~running.done_B
            running = turned(running.rows(left)) if left.any() else None
            owners = np.array([number_of[int(seed)] for seed in done.seed_B])
            for number in np.unique(owners):
                results[int(number)] = done.rows(owners == number).result()
    return [results[number] for number in range(len(asked))]


def assert_same(actual: SampleResult, right: SampleResult) -> None:
    torch.testing.assert_close(actual.images_BCHW, right.images_BCHW, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actual.routing_SBK, right.routing_SBK, rtol=1e-9, atol=1e-9)
    assert (actual.num_expert_rows, actual.num_router_rows) == (right.num_expert_rows, right.num_router_rows)


@settings(max_examples=40)
@given(data=st.data(), count=st.integers(2, 5), every=st.integers(1, 3), table=st.booleans())
def test_rows_of_any_requests_go_on_as_alone(data: st.DataObject, count: int, every: int, table: bool) -> None:
    """With a table of the prior, or the router asked for it; some without an expert that others have."""
    info = SYSTEM.info() if table else replace(SYSTEM.info(), prior_CK=None)
    asked = [data.draw(requests(10 * number)) for number in range(count)]
    missing = data.draw(st.lists(st.sampled_from([None, 1, 3]), min_size=count, max_size=count))
    infos = [
        info.with_available(torch.arange(4) != gone) if gone and request.settings.strategy != "oracle" else info
        for request, gone in zip(asked, missing, strict=True)
    ]
    together = sampled_together(asked, infos, every)
    for request, own, actual in zip(asked, infos, together, strict=True):
        assert_same(actual, driver.sample(request, own, SYSTEM.experts, SYSTEM.router))


@pytest.mark.parametrize("strategy", EVERY)
def test_rows_that_part_midway_end_where_they_would_have(strategy: str) -> None:
    chosen = SamplingSettings(strategy=strategy, solver="heun", steps=4, guidance_scale=2.0)
    cluster_B = torch.arange(6) % 4 if strategy == "oracle" else None
    request = SampleRequest(tuple(range(6)), torch.arange(6) % 3, chosen, cluster_B)
    right = driver.sample(request, SYSTEM.info(), SYSTEM.experts, SYSTEM.router)
    state = start(request, SYSTEM.info())
    for _ in range(3):  # into the second step
        state = one_velocity(state)
    for rows in (np.array([4, 1]), np.array([0, 2, 3, 5])):
        part = driver.run(turned(state.rows(rows)), SYSTEM.experts, SYSTEM.router).result()
        torch.testing.assert_close(part.images_BCHW, right.images_BCHW[rows], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(part.routing_SBK, right.routing_SBK[:, rows], rtol=1e-9, atol=1e-9)


def contents(state: Trajectories) -> dict[str, torch.Tensor]:
    """Copies of all that a state holds."""
    return safetensors.torch.load(pack(state))


@pytest.mark.parametrize("strategy", EVERY)
def test_an_advance_changes_nothing_that_it_was_given(strategy: str) -> None:
    """So that it may be repeated by whoever still has the state."""
    chosen = SamplingSettings(strategy=strategy, solver="ab2", steps=4, guidance_scale=2.0)
    cluster_B = torch.arange(6) % 4 if strategy == "oracle" else None
    state = start(SampleRequest(tuple(range(6)), torch.arange(6) % 3, chosen, cluster_B), SYSTEM.info())
    right = driver.run(state, SYSTEM.experts, SYSTEM.router).result()
    state = start(SampleRequest(tuple(range(6)), torch.arange(6) % 3, chosen, cluster_B), SYSTEM.info())
    while not state.done_B.any():
        before, given = contents(state), answers(state)
        after = advance(state, given)
        first = contents(after)
        before["routing"] = contents(state)["routing"]  # written in place
        assert all(torch.equal(before[name], tensor) for name, tensor in contents(state).items())
        again = contents(advance(state, given))
        assert all(torch.equal(first[name], tensor) for name, tensor in again.items())
        state = after
    assert_same(state.result(), right)


def test_rows_that_part_before_their_experts_answer_ask_the_router_again() -> None:
    """Nothing of the choice is kept by halves: a switch of expert is one still, and is paid for once."""
    chosen = SamplingSettings(strategy="sample-1", solver="ab2", steps=6)
    request = SampleRequest(tuple(range(8)), torch.arange(8) % 3, chosen)
    right = driver.sample(request, SYSTEM.info(), SYSTEM.experts, SYSTEM.router)
    assert (right.experts_SB[1:] != right.experts_SB[:-1]).any()
    state = start(request, SYSTEM.info())
    while not state.done_B.any():
        asked = advance(state, answers(state))
        state = turned(unpack(pack(asked.rows(np.arange(8))), SYSTEM.info()))
        state = one_velocity(state)
    assert_same(state.result(), right)


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("text", [False, True])
def test_packed_rows_go_on_elsewhere(strategy: str, text: bool) -> None:
    """In the middle of a step as at the start of one, labels as texts: the same images and routings."""
    texts = closed_forms.Texts(SYSTEM)
    system = texts if text else SYSTEM
    info, experts, router = system.info(), system.experts, system.router
    label_B = torch.arange(5) % 3
    chosen = SamplingSettings(strategy=strategy, solver="heun", steps=4, guidance_scale=2.0)
    cluster_B = torch.arange(5) % 4 if strategy == "oracle" else None
    seeds = (0, 1, 2**63 + 1, 2**64 - 1, 7)
    state = start(SampleRequest(seeds, texts.texts(label_B) if text else label_B, chosen, cluster_B), info)
    right = driver.run(state, experts, router).result()
    velocities = 0
    while not state.done_B.any():
        if velocities in (0, 3, 4):
            state = turned(unpack(pack(state), info))
        while state.turn.chosen is None:
            state = advance(state, driver.answers(next_calls(state), experts, router))
        state, velocities = advance(state, driver.answers(next_calls(state), experts, router)), velocities + 1
    assert torch.equal(state.result().images_BCHW, right.images_BCHW)
    assert_same(unpack(pack(state), info).result(), right)


def test_rows_that_were_packed_apart_are_one_request_again() -> None:
    """Equal plans are one, so that all rows move in lockstep."""
    asked = SampleRequest((1, 2, 3), torch.tensor([0, 1, 2]), SamplingSettings(strategy="top-2", steps=3))
    state = start(asked, SYSTEM.info())
    parts = [unpack(pack(state.rows(rows)), SYSTEM.info()) for rows in (np.array([0]), np.array([1, 2]))]
    together = turned(Trajectories.joined(parts))
    assert len(together.plans) == 1
    assert_same(
        driver.run(together, SYSTEM.experts, SYSTEM.router).result(),
        driver.run(state, SYSTEM.experts, SYSTEM.router).result(),
    )


def test_bytes_of_other_trajectories_are_refused() -> None:
    state = start(SampleRequest((1, 2), torch.tensor([0, 1]), SamplingSettings()), SYSTEM.info())
    data = pack(state)
    other = closed_forms.random_gaussians(seed=3, dim=2, num_experts=5, num_conditions=3)
    for bad in (b"", data[:-1], data.replace(b"ab2", b"ab9")):
        with pytest.raises(SamplingError, match="no trajectories of this mixture"):
            unpack(bad, SYSTEM.info())
    with pytest.raises(SamplingError, match="no trajectories of this mixture"):
        unpack(data, other.info())
    tensors = safetensors.torch.load(data)
    for name, tensor in {
        "position": tensors["position"] + 26,
        "plan": tensors["plan"] + 1,
        "label": tensors["label"] + 3,
        "x": tensors["x"][:, :, :, :1],
        "history": tensors["history"].float(),
        "usable": tensors["usable"] + 9,
        "weights": tensors["weights"] + 0.5,
        "routing": tensors["routing"][:, 1:],
        "plans": torch.tensor([91] * 200_000, dtype=torch.uint8),
    }.items():
        with pytest.raises(SamplingError) as error:
            unpack(safetensors.torch.save({**tensors, name: tensor.contiguous()}), SYSTEM.info())
        assert len(str(error.value)) < 400


@pytest.mark.parametrize("text", [False, True])
def test_a_call_crosses_as_bytes(text: bool) -> None:
    info = SYSTEM.info()
    condition = Text(torch.randn(2, 3, 4), torch.tensor([[True, True, False]] * 2)) if text else torch.tensor([1, 0])
    x_BCHW = torch.randn(2, *info.image_shape, dtype=info.dtype)
    call = ExpertCall(1, x_BCHW, torch.rand(2, dtype=info.dtype), condition)
    back = unpack_call(pack_call(call), 1, info)
    assert torch.equal(back.x_BCHW, call.x_BCHW) and torch.equal(back.t_B, call.t_B) and back.expert == 1
    pairs = [(back.condition, condition)]
    if isinstance(condition, Text):
        assert isinstance(back.condition, Text)
        pairs = [(back.condition.tokens_BLE, condition.tokens_BLE), (back.condition.mask_BL, condition.mask_BL)]
    assert all(torch.equal(one, other) for one, other in pairs)


def test_bytes_that_are_no_call_are_refused() -> None:
    info = SYSTEM.info()
    x_BCHW, t_B = torch.randn(2, *info.image_shape, dtype=info.dtype), torch.rand(2, dtype=info.dtype)
    data = pack_call(ExpertCall(1, x_BCHW, t_B, torch.tensor([1, 0])))
    unpack_call(data, 1, info)
    tensors = safetensors.torch.load(data)
    changed = ({"x": x_BCHW[..., :1]}, {"x": x_BCHW.half()}, {"t": t_B[:1]}, {"label": torch.tensor([1])})
    others = [safetensors.torch.save({n: t.contiguous() for n, t in (tensors | each).items()}) for each in changed]
    for bad in (b"", data[:-1], safetensors.torch.save({"x": x_BCHW}), *others):
        with pytest.raises(SamplingError, match="no call of this mixture"):
            unpack_call(bad, 1, info)
