import math
from dataclasses import replace

import pytest
import torch

from ddm_ray.core.solvers import SOLVERS
from ddm_ray.errors import SamplingError
from ddm_ray.models.dit import DiT
from ddm_ray.models.router import Router
from ddm_ray.sampling.driver import sample
from ddm_ray.sampling.trajectory import (
    ExpertCall,
    MixtureInfo,
    RouterCall,
    SampleRequest,
    initial_noise,
    routing_uniforms,
    trajectories,
)
from tests.core import closed_forms, oracles

INFO = MixtureInfo.from_counts(
    torch.tensor([[8, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [9, 5, 1, 1]]), image_shape=(1, 4, 4)
)


def request(num_images: int = 4, **fields) -> SampleRequest:
    label_B = torch.arange(num_images) % (INFO.num_classes + 1)
    return SampleRequest(**{"seeds": tuple(range(num_images)), "label_B": label_B, "steps": 3, **fields})


def networks() -> tuple[list[DiT], Router]:
    torch.manual_seed(0)
    size = {
        "image_size": 4,
        "channels": 1,
        "num_classes": 3,
        "patch_size": 2,
        "width": 16,
        "depth": 1,
        "heads": 2,
    }
    experts, router = [DiT(**size) for _ in range(4)], Router(num_experts=4, **size)
    with torch.no_grad():
        for parameter in [p for model in [*experts, router] for p in model.parameters()]:
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return experts, router


def test_priors_from_counts() -> None:
    right = [[1, 0, 0, 0], [0.25] * 4, [9 / 16, 5 / 16, 1 / 16, 1 / 16], [9 / 16, 5 / 16, 1 / 16, 1 / 16]]
    torch.testing.assert_close(INFO.prior_CK, torch.tensor(right, dtype=torch.float64))
    assert (INFO.num_experts, INFO.num_classes) == (4, 3)
    with pytest.raises(SamplingError, match="totals"):
        MixtureInfo.from_counts(torch.zeros(3, 4), (1, 4, 4))
    with pytest.raises(SamplingError, match="alive_K has shape"):
        INFO.with_alive(torch.ones(3, dtype=torch.bool))


def test_noise_is_each_seeds_own() -> None:
    together = initial_noise((3, 2**63, 5), (3, 8, 8))
    assert together.dtype == torch.float32
    assert together.shape == (3, 3, 8, 8)
    assert torch.equal(together[1:2], initial_noise((2**63,), (3, 8, 8)))
    many = initial_noise(range(500), (1, 8, 8))
    assert abs(many.mean()) < 0.03
    assert abs(many.std() - 1) < 0.03
    assert len({float(row.sum()) for row in many}) == 500


def test_routing_uniforms_are_uniform_and_apart_from_the_noise() -> None:
    uniforms_B = routing_uniforms(range(2000))
    assert uniforms_B.dtype == torch.float64
    assert torch.equal(uniforms_B[7:8], routing_uniforms([7]))
    assert (uniforms_B.sort().values - (torch.arange(2000) + 0.5) / 2000).abs().max() < 0.04
    first_B = initial_noise(range(2000), (1, 1, 1)).flatten().double()
    assert abs(torch.corrcoef(torch.stack([uniforms_B, first_B]))[0, 1]) < 0.07


@pytest.mark.parametrize("strategy", ["once", "full", "top-1", "top-2"])
@pytest.mark.parametrize(("solver", "scale"), [("ab2", 1.0), ("heun", 2.5)])
def test_an_image_does_not_depend_on_its_batch_mates(strategy: str, solver: str, scale: float) -> None:
    experts, router = networks()
    wanted = request(8, strategy=strategy, solver=solver, guidance_scale=scale)
    together = sample(wanted, INFO, experts, router)
    for i in (0, 3, 7):
        single = replace(wanted, seeds=wanted.seeds[i : i + 1], label_B=wanted.label_B[i : i + 1])
        alone = sample(single, INFO, experts, router)
        torch.testing.assert_close(alone.images_BCHW[0], together.images_BCHW[i], atol=2e-5, rtol=1e-4)
        assert torch.equal(alone.experts_SB[:, 0], together.experts_SB[:, i])


def walk(wanted: SampleRequest, info: MixtureInfo = INFO) -> list[list[ExpertCall | RouterCall]]:
    """All batches of calls, answered with a velocity of 1 and posterior .4 .3 .2 .1 (rows alike)."""
    generator, batches = trajectories(wanted, info), []
    logits_K = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    calls = next(generator)
    while True:
        batches.append(calls)
        answers = [
            torch.ones_like(c.x_BCHW) if isinstance(c, ExpertCall) else logits_K.expand(len(c.x_BCHW), 4) for c in calls
        ]
        try:
            calls = generator.send(answers)
        except StopIteration:
            return batches


def described(batches) -> list[list[tuple[str, int]]]:
    return [
        [(f"expert {c.expert}" if isinstance(c, ExpertCall) else "router", len(c.x_BCHW)) for c in calls]
        for calls in batches
    ]


def test_once_asks_for_one_expert_per_image_and_never_the_router() -> None:
    batches = walk(request(4, label_B=torch.zeros(4, dtype=torch.int64), guidance_scale=3.0))
    assert described(batches) == [[("expert 0", 8)]] * 3
    assert batches[0][0].label_B.tolist() == [0] * 4 + [3] * 4


def test_full_asks_for_all_experts_under_both_posteriors_at_every_velocity() -> None:
    batches = walk(request(2, strategy="full", solver="heun", guidance_scale=2.0, steps=2))
    every = [[("router", 4)], [(f"expert {k}", 4) for k in range(4)]]
    assert described(batches) == every * 4
    assert batches[0][0].label_B.tolist() == [0, 1, 3, 3]


def test_sparse_asks_the_router_once_a_step_for_the_conditional_branch() -> None:
    batches = walk(request(2, strategy="top-2", solver="heun", guidance_scale=2.0, steps=2))
    experts = [("expert 0", 4), ("expert 1", 4)]
    assert described(batches) == [[("router", 2)], experts, experts] * 2


def test_times_run_from_one_to_zero() -> None:
    batches = walk(request(1, strategy="once", solver="heun", steps=2))
    assert [float(calls[0].t_B) for calls in batches] == [1.0, 0.5, 0.5, 0.0]
    assert batches[0][0].x_BCHW.equal(initial_noise((0,), (1, 4, 4)))


def test_scale_one_is_conditional_alone_and_zero_unconditional_alone() -> None:
    labels = [walk(request(2, strategy="full", guidance_scale=s))[0][0].label_B.tolist() for s in (1, 0)]
    assert labels == [[0, 1], [3, 3]]
    experts, router = networks()
    for strategy in ("once", "top-1", "full"):
        zero = sample(request(3, strategy=strategy, guidance_scale=0.0), INFO, experts, router)
        null = request(3, strategy=strategy, label_B=torch.full((3,), 3))
        assert torch.equal(zero.images_BCHW, sample(null, INFO, experts, router).images_BCHW)


def test_rows_paid_for_are_counted() -> None:
    experts, router = networks()
    paid = {}
    for strategy in ("once", "full", "top-2"):
        sampled = sample(request(5, strategy=strategy, guidance_scale=2.0), INFO, experts, router)
        paid[strategy] = (sampled.num_expert_rows, sampled.num_router_rows)
        assert sampled.experts_SB.shape == (3, 5)
        assert sampled.experts_SB.dtype == torch.int64
    assert paid == {"once": (30, 0), "full": (120, 30), "top-2": (60, 15)}


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_endpoint_is_that_of_the_monolith(solver: str) -> None:
    system = closed_forms.digits()
    label_B = torch.tensor([4, 0] + [system.num_classes] * 14)
    wanted = SampleRequest(tuple(range(16)), label_B, 10, 1.0, "full", solver)
    mixture = sample(wanted, system.info(), system.experts, system.router).images_BCHW
    one = system.field_of(None)
    alone = sample(replace(wanted, strategy="once"), system.monolith_info(), [one]).images_BCHW
    torch.testing.assert_close(mixture, alone, atol=1e-6, rtol=0)
    sparse = sample(replace(wanted, strategy="top-1"), system.info(), system.experts, system.router).images_BCHW
    assert (sparse - alone).abs().max() > 1e-3


def test_top_1_bends_the_mixture_and_once_does_not() -> None:
    system = closed_forms.three_gaussians()
    fields = {"steps": 16, "solver": "heun"}
    bent = oracles.sample_system(system, 2000, 1, strategy="top-1", **fields)
    true = oracles.sample_system(system, 2000, 1, strategy="once", **fields)
    assert system.frechet(bent.images_BCHW, 1) > 0.3
    assert system.frechet(true.images_BCHW, 1) < 0.02


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_velocity_that_is_not_finite_names_the_expert_and_t(bad: float) -> None:
    experts, router = networks()

    def broken(x_BCHW, t_B, label_B):
        return torch.where(t_B < 0.9, bad, 0.0).view(-1, 1, 1, 1).expand_as(x_BCHW)

    experts[2] = broken
    with pytest.raises(SamplingError, match=r"expert 2 .* t = 0.6667"):
        sample(request(3, strategy="full"), INFO, experts, router)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": (1, 2)}, "2 seeds with labels of shape"),
        ({"seeds": (), "label_B": torch.zeros(0, dtype=torch.int64)}, "0 seeds"),
        ({"label_B": torch.tensor([0, 1, 2, 4])}, "labels must be int64 from 0 to 3"),
        ({"label_B": torch.tensor([0, 1, 2, -1])}, "labels must be"),
        ({"label_B": torch.zeros(4)}, "labels must be int64"),
        ({"seeds": (0, 1, 2, -1)}, "seeds must be"),
        ({"seeds": (0, 1, 2, 2**64)}, "seeds must be"),
        ({"steps": 0}, "steps is 0"),
        ({"guidance_scale": math.nan}, "guidance_scale is nan"),
        ({"guidance_scale": math.inf}, "guidance_scale is inf"),
        ({"solver": "rk4"}, "unknown solver 'rk4': use one of euler, heun, ab2"),
        ({"strategy": "top-5"}, "unknown strategy 'top-5' for 4 experts: use full, once or top-1 to top-4"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_any_call(fields: dict, message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        trajectories(request(**fields), INFO)


def test_guidance_without_classes_is_refused() -> None:
    info = MixtureInfo.from_counts(torch.tensor([[3, 1]]), (1, 4, 4))
    wanted = SampleRequest((1,), torch.zeros(1, dtype=torch.int64), guidance_scale=2.0)
    with pytest.raises(SamplingError, match="no classes"):
        trajectories(wanted, info)
    trajectories(replace(wanted, guidance_scale=1.0), info)
