"""Training on some of an image's tokens: which are kept, and the loss that is taken on them."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.core.flow import PATHS, Flow
from ddm_ray.core.streams import BATCH, stream
from ddm_ray.core.times import TimeSampling
from ddm_ray.models.dit import DiT
from ddm_ray.train.objectives import Batch, Draws, ExpertLoss, Masking, draw_batch
from tests.core.paths_closed_form import PAIRS

TOKENS = 16
SIZE = {"image_size": 8, "channels": 2, "num_classes": 3, "patch_size": 2, "width": 16, "depth": 2, "heads": 4}


class Fixed(nn.Module):
    """Gives the same answer whatever it is asked, and whichever tokens it is given."""

    def __init__(self, answer_BCHW: Tensor) -> None:
        super().__init__()
        self.answer_BCHW = answer_BCHW

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition, kept_BM: Tensor | None = None) -> Tensor:
        return self.answer_BCHW


def random_batch(rows: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(0)
    data, noise = torch.randn(2, rows, 2, 8, 8, generator=generator, dtype=torch.float64)
    t_B = torch.linspace(0.2, 0.9, rows, dtype=torch.float64)
    return Batch(data, noise, t_B, torch.arange(rows) % 4, torch.zeros(rows))


def network(closed: bool = False, **form: float) -> DiT:
    """Of random weights; with gates `closed`, its tokens never meet."""
    torch.manual_seed(0)
    model = DiT(**SIZE, **form).double()
    for name, parameter in model.named_parameters():
        if not (closed and name.startswith("trunk.blocks")):
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def drawn(
    masking: Masking | None, seed: int = 7, key: tuple[int, ...] = (2, 1), step: int = 5, rows: int = 64
) -> Draws:
    return draw_batch(seed, key, step, rows, (2, 8, 8), 0.25, TimeSampling("logit-normal"), "linear", masking)


def pixels_of(kept_BM: Tensor) -> Tensor:
    """(B, 1, 8, 8), true where a kept token's pixels are."""
    kept_BN = torch.zeros(len(kept_BM), TOKENS).scatter(1, kept_BM, 1.0)
    return kept_BN.view(-1, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3).bool()


@pytest.mark.parametrize(
    ("num_tokens", "ratio", "num_kept"),
    [
        (256, 0.5, 128),
        (15, 0.9, 2),
        (1, 0.99, 1),
        (3, 0.5, 2),
    ],
)
def test_the_number_kept_is_rounded_half_up_and_one_at_least(num_tokens: int, ratio: float, num_kept: int) -> None:
    assert Masking.of(num_tokens, ratio) == Masking(num_tokens, num_kept)


@given(st.integers(1, 4096), st.integers(0, 999))
def test_any_share_is_rounded_in_decimals(num_tokens: int, thousandths: int) -> None:
    kept = Masking.of(num_tokens, thousandths / 1000).num_kept
    exact = Fraction(1000 - thousandths, 1000) * num_tokens
    assert 1 <= kept <= num_tokens
    assert Fraction(-1, 2) < kept - exact <= Fraction(1, 2) or (kept == 1 and exact < Fraction(1, 2))


@pytest.mark.parametrize(("num_tokens", "num_kept"), [(1, 1), (16, 1), (16, 15), (16, 16), (256, 100), (1024, 100)])
def test_the_mask_is_drawn_last_and_is_the_streams_least_uniforms(num_tokens: int, num_kept: int) -> None:
    masked, unmasked = drawn(Masking(num_tokens, num_kept)), drawn(None)
    assert unmasked.kept_BM is None and masked.kept_BM is not None
    for name in ("noise_BCHW", "t_B", "drop_B"):
        assert torch.equal(getattr(masked, name), getattr(unmasked, name)), name
    numbers = stream(7, BATCH, 2, 1, 5)
    numbers.standard_normal((64, 2, 8, 8), np.float32), numbers.random(64, np.float32), numbers.random(64)
    uniform_BN = numbers.random((64, num_tokens))
    expected = [sorted(np.argsort(uniform_N)[:num_kept].tolist()) for uniform_N in uniform_BN]
    assert masked.kept_BM.dtype == torch.int64
    assert masked.kept_BM.tolist() == expected


def test_the_kept_tokens_depend_on_seed_key_step_and_place_alone() -> None:
    masking = Masking(TOKENS, 8)
    kept_BM = drawn(masking).kept_BM
    assert torch.equal(drawn(masking).kept_BM, kept_BM)
    for other in (drawn(masking, seed=8), drawn(masking, key=(2, 0)), drawn(masking, step=6)):
        assert (other.kept_BM != kept_BM).any(1).float().mean() > 0.9
    assert len(kept_BM.unique(dim=0)) > 60


def test_every_set_of_tokens_is_as_likely() -> None:
    kept_BM = drawn(Masking(4, 2), rows=24_000).kept_BM
    sets, counts = kept_BM.unique(dim=0, return_counts=True)
    assert sets.tolist() == [list(pair) for pair in combinations(range(4), 2)]
    # Six sets of 4,000 each: the standard deviation of a count is 58.
    assert (counts - 4000).abs().max() < 5 * 58


@pytest.mark.parametrize("flow", PAIRS, ids=str)
def test_with_all_tokens_kept_the_loss_is_that_of_the_whole_image(flow: Flow) -> None:
    model, batch = network(), random_batch()
    masked = replace(batch, kept_BM=torch.arange(TOKENS).expand(4, TOKENS))
    masked_loss_B, expected = (ExpertLoss(flow, 2)(model, part) for part in (masked, batch))
    torch.testing.assert_close(masked_loss_B, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(loss_B.sum(), list(model.parameters())) for loss_B in (masked_loss_B, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("flow", PAIRS, ids=str)
def test_only_kept_pixels_count_and_each_as_much(flow: Flow) -> None:
    batch, path = random_batch(), PATHS[flow.path]
    kept_BM = drawn(Masking(TOKENS, 6), rows=4).kept_BM
    pixels = pixels_of(kept_BM).expand(4, 2, 8, 8)
    sigma, alpha_slope, sigma_slope = (
        of(batch.t_B).view(-1, 1, 1, 1) for of in (path.sigma, path.alpha_slope, path.sigma_slope)
    )
    right = {
        "velocity": alpha_slope * batch.data_BCHW + sigma_slope * batch.noise_BCHW,
        "noise": batch.noise_BCHW,
        "data": batch.data_BCHW,
        "score": -batch.noise_BCHW / sigma,
    }[flow.prediction]
    error = random_batch(rows=4).noise_BCHW.roll(1, 0)
    answer = right + torch.where(pixels, error, 1e6)
    loss_B = ExpertLoss(flow, 2)(Fixed(answer), replace(batch, kept_BM=kept_BM))
    weight = sigma if flow.prediction == "score" else torch.ones_like(sigma)
    expected_B = ((weight * error).square() * pixels).sum((1, 2, 3)) / (6 * 2 * 2 * 2)
    torch.testing.assert_close(loss_B, expected_B, rtol=1e-9, atol=0)


@pytest.mark.parametrize("skip", [None, 0.5])
def test_the_gradient_by_dropped_pixels_is_exactly_zero(skip: float | None) -> None:
    model, batch = network(**({} if skip is None else {"analytic_skip": skip})), random_batch()
    kept_BM = drawn(Masking(TOKENS, 6), rows=4).kept_BM
    pixels = pixels_of(kept_BM).expand(4, 2, 8, 8)
    leaves = [part.clone().requires_grad_() for part in (batch.data_BCHW, batch.noise_BCHW)]
    masked = replace(batch, data_BCHW=leaves[0], noise_BCHW=leaves[1], kept_BM=kept_BM)
    ExpertLoss(Flow(), 2)(model, masked).sum().backward()
    for leaf in leaves:
        assert (leaf.grad[~pixels] == 0).all()
        assert (leaf.grad[pixels] != 0).all()


@pytest.mark.parametrize("flow", [Flow(), Flow("cosine", "score")], ids=str)
@pytest.mark.parametrize("num_kept", [1, 2, 15])
def test_the_mean_over_all_masks_is_the_whole_loss_where_tokens_do_not_meet(flow: Flow, num_kept: int) -> None:
    """Each token is in as many sets of M as any other, so a sum over tokens has the mean that it has over all."""
    batch = random_batch(rows=1)
    for model in (network(closed=True), Fixed(random_batch(rows=2).data_BCHW[1:])):
        with torch.no_grad():
            every = [
                ExpertLoss(flow, 2)(model, replace(batch, kept_BM=torch.tensor([kept])))
                for kept in combinations(range(TOKENS), num_kept)
            ]
            unmasked_loss = ExpertLoss(flow, 2)(model, batch)
        torch.testing.assert_close(torch.stack(every).mean(0), unmasked_loss, rtol=1e-10, atol=0)


def test_what_tokens_learn_of_each_other_is_lost_with_the_mask() -> None:
    """The control: where tokens do meet, the mean over masks is another number."""
    batch, model = random_batch(rows=1), network()
    with torch.no_grad():
        every = [ExpertLoss(Flow(), 2)(model, replace(batch, kept_BM=torch.tensor([[kept]]))) for kept in range(TOKENS)]
        unmasked_loss = ExpertLoss(Flow(), 2)(model, batch)
    assert (torch.stack(every).mean() / unmasked_loss - 1).abs() > 1e-3


def test_in_bf16_a_masked_loss_is_the_same_within_its_precision() -> None:
    model, batch = network(analytic_skip=0.5).float(), random_batch()
    kept_BM = drawn(Masking(TOKENS, 6), rows=4).kept_BM
    parts = [part.float() for part in (batch.data_BCHW, batch.noise_BCHW, batch.t_B)]
    masked = Batch(*parts, batch.condition, batch.cluster_B, kept_BM)
    exact = ExpertLoss(Flow(), 2)(model, masked)
    in_bf16 = ExpertLoss(Flow(), 2)(model.bfloat16(), masked)
    assert in_bf16.dtype == torch.float32
    torch.testing.assert_close(in_bf16, exact, rtol=0.05, atol=0)
