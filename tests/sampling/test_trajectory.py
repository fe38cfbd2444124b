import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core.names import STRATEGIES
from ddm_ray.core.solvers import SOLVERS
from ddm_ray.errors import SamplingError
from ddm_ray.models.dit import DiT
from ddm_ray.models.router import Router
from ddm_ray.sampling.driver import sample
from ddm_ray.sampling.noise import initial_noise, routing_uniforms
from ddm_ray.sampling.request import ExpertCall, MixtureInfo, RouterCall, SampleRequest
from ddm_ray.sampling.trajectory import advance, next_calls, start
from tests.core import closed_forms

INFO = MixtureInfo.from_counts(
    torch.tensor([[8, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [9, 5, 1, 1]]), image_shape=(1, 4, 4)
)


EVERY = (*(form.example for form in STRATEGIES.values()), "top-1", "nucleus-0.8-0.5", "sample-3")


def request(num_images: int = 4, label_B=None, cluster_B=None, **settings) -> SampleRequest:
    label_B = torch.arange(num_images) % (INFO.num_classes + 1) if label_B is None else label_B
    return SampleRequest(tuple(range(num_images)), label_B, SamplingSettings(**{"steps": 3, **settings}), cluster_B)


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
    uniforms_BK = routing_uniforms(range(2000), 3, 0)
    assert uniforms_BK.dtype == torch.float64
    assert uniforms_BK.shape == (2000, 3)
    assert torch.equal(uniforms_BK[7:8], routing_uniforms([7], 3, 0))
    # More experts or other steps don't change what a seed drew.
    assert torch.equal(uniforms_BK[:5, :2], routing_uniforms(range(5), 2, 0))
    assert not torch.equal(uniforms_BK[:5], routing_uniforms(range(5), 3, 1))
    for uniforms_B in uniforms_BK.T:
        assert (uniforms_B.sort().values - (torch.arange(2000) + 0.5) / 2000).abs().max() < 0.04
    first_B = initial_noise(range(2000), (1, 1, 1)).flatten().double()
    columns = torch.corrcoef(torch.stack([*uniforms_BK.T, first_B]))
    assert (columns - torch.eye(4, dtype=torch.float64)).abs().max() < 0.08


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize(("solver", "scale"), [("ab2", 1.0), ("heun", 2.5)])
def test_an_image_does_not_depend_on_its_batch_mates(strategy: str, solver: str, scale: float) -> None:
    experts, router = networks()
    sample_request = request(8, strategy=strategy, solver=solver, guidance_scale=scale, cluster_B=torch.arange(8) % 4)
    together = sample(sample_request, INFO, experts, router)
    for i in (0, 3, 7):
        alone = sample(sample_request.rows(slice(i, i + 1)), INFO, experts, router)
        torch.testing.assert_close(alone.images_BCHW[0], together.images_BCHW[i], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(alone.routing_SBK[:, 0], together.routing_SBK[:, i], atol=2e-5, rtol=1e-4)


def walk(sample_request: SampleRequest, info: MixtureInfo = INFO) -> list[list[ExpertCall | RouterCall]]:
    """All batches of calls, answered with a velocity of 1 and posterior .4 .3 .2 .1 (rows alike)."""
    state, batches = start(sample_request, info), []
    logits_K = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    while not state.done_B.any():
        batches.append(calls := next_calls(state))
        answers = [
            torch.ones_like(c.x_BCHW) if isinstance(c, ExpertCall) else logits_K.expand(len(c.x_BCHW), 4) for c in calls
        ]
        state = advance(state, answers)
    return batches


def described(batches) -> list[list[tuple[str, int]]]:
    return [
        [(f"expert {c.expert}" if isinstance(c, ExpertCall) else "router", len(c.x_BCHW)) for c in calls]
        for calls in batches
    ]


def test_once_asks_for_one_expert_per_image_and_never_the_router() -> None:
    batches = walk(request(4, label_B=torch.zeros(4, dtype=torch.int64), guidance_scale=3.0))
    assert described(batches) == [[("expert 0", 8)]] * 3
    assert batches[0][0].condition.tolist() == [0] * 4 + [3] * 4


def test_full_asks_for_all_experts_under_both_posteriors_at_every_velocity() -> None:
    batches = walk(request(2, strategy="full", solver="heun", guidance_scale=2.0, steps=2))
    every = [[("router", 4)], [(f"expert {k}", 4) for k in range(4)]]
    assert described(batches) == every * 3
    assert batches[0][0].condition.tolist() == [0, 1, 3, 3]


def test_sparse_asks_the_router_for_the_conditional_branch_and_within_a_step_for_weights_alone() -> None:
    batches = walk(request(2, strategy="top-2", solver="heun", guidance_scale=2.0, steps=2))
    experts = [("expert 0", 4), ("expert 1", 4)]
    assert described(batches) == [[("router", 2)], experts] * 3
    assert [float(call.t_B[0]) for call, *_ in batches] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("strategy", ["top-1", "sticky"])
def test_a_single_expert_has_no_weights_to_ask_for_within_a_step(strategy: str) -> None:
    batches = walk(request(2, strategy=strategy, solver="heun", steps=2))
    router, expert = [("router", 2)], [("expert 0", 2)]
    assert described(batches) == [router, expert, expert, router, expert]


def test_guidance_by_expert_asks_the_router_for_the_conditional_branch_alone() -> None:
    fields = {"strategy": "full", "solver": "heun", "guidance_scale": 2.0, "steps": 2, "guidance_kind": "per-expert"}
    batches = walk(request(2, **fields))
    assert described(batches) == [[("router", 2)], [(f"expert {k}", 4) for k in range(4)]] * 3
    assert batches[0][0].condition.tolist() == [0, 1]


def test_rows_and_conditions_of_both_branches_are_stacked_alike() -> None:
    batches = walk(request(3, strategy="full", guidance_scale=2.0, steps=1))
    for call in (batches[0][0], *batches[1]):
        assert call.condition.tolist() == [0, 1, 2, 3, 3, 3]
        assert torch.equal(call.x_BCHW[:3], call.x_BCHW[3:])
        assert torch.equal(call.x_BCHW[:3], initial_noise(range(3), (1, 4, 4)))


@pytest.mark.parametrize(
    ("times", "right"),
    [("uniform", [1.0, 0.5, 0.5]), ("cosine", [1.0, 0.5, 0.5]), ("shifted-3", [1.0, 0.75, 0.75])],
)
def test_times_run_from_one_but_not_to_zero(times: str, right: list[float]) -> None:
    batches = walk(request(1, strategy="once", solver="heun", steps=2, times=times))
    assert [float(calls[0].t_B) for calls in batches] == pytest.approx(right, abs=1e-7)
    assert batches[0][0].x_BCHW.equal(initial_noise((0,), (1, 4, 4)))


def test_scale_one_is_conditional_alone_and_zero_unconditional_alone() -> None:
    labels = [walk(request(2, strategy="full", guidance_scale=s))[0][0].condition.tolist() for s in (1, 0)]
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
    sample_request = SampleRequest(
        tuple(range(16)), label_B, SamplingSettings(steps=10, strategy="full", solver=solver)
    )
    mixture = sample(sample_request, system.info(), system.experts, system.router).images_BCHW
    one = system.field_of(None)
    alone = sample(sample_request.changed(strategy="once"), system.monolith_info(), [one]).images_BCHW
    torch.testing.assert_close(mixture, alone, atol=1e-6, rtol=0)
    sparse = sample(sample_request.changed(strategy="top-1"), system.info(), system.experts, system.router).images_BCHW
    assert (sparse - alone).abs().max() > 1e-3


@pytest.mark.parametrize("strategy", EVERY)
def test_a_mixture_of_one_is_its_expert_whatever_the_strategy(strategy: str) -> None:
    one = closed_forms.ONE
    zero_B = torch.zeros(3, dtype=torch.int64)
    sample_request = SampleRequest((1, 2, 3), zero_B, SamplingSettings(steps=6), cluster_B=zero_B)
    right = sample(sample_request, one.info(), one.experts).images_BCHW
    if strategy in ("top-2", "sample-3"):
        with pytest.raises(SamplingError, match="for 1 experts"):
            sample(sample_request.changed(strategy=strategy), one.info(), one.experts, one.router)
    else:
        images_BCHW = sample(sample_request.changed(strategy=strategy), one.info(), one.experts, one.router).images_BCHW
        torch.testing.assert_close(images_BCHW, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_steps_are_told_to_the_end_by_every_solver(solver: str) -> None:
    system, steps = closed_forms.three_gaussians(), []
    sample_request = SampleRequest(
        (1, 2), torch.tensor([0, 1]), SamplingSettings(steps=3, strategy="top-2", solver=solver)
    )
    sampled = sample(
        sample_request, system.info(), system.experts, system.router, on_step=lambda *step: steps.append(step)
    )
    assert [(number, t) for number, t, _ in steps] == [(0, pytest.approx(2 / 3)), (1, pytest.approx(1 / 3)), (2, 0.0)]
    assert torch.equal(steps[-1][2], sampled.images_BCHW)
