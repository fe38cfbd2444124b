import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddm_ray.core.condition import Text
from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import (
    forward_flops_per_row,
    num_parameters,
    training_bytes,
    training_flops_per_row,
    weights_bytes,
)
from ddm_ray.models.router import Router

SHAPE = (3, 8, 8)
SIZE = {
    "image_size": 8,
    "channels": 3,
    "num_classes": 3,
    "patch_size": 2,
    "width": 16,
    "depth": 2,
    "heads": 4,
}
TOKENS, WIDTH, PATCH, HIDDEN, DEPTH, TIME = 16, 16, 12, 64, 2, 256


def by_hand(backward: bool, tokens: int = TOKENS) -> int:
    """Two FLOPs per multiply-add; backward is twice forward, but inputs that need no gradient cost once."""
    passes, first_passes = (3, 2) if backward else (1, 1)
    per_token = 4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN
    attention = 2 * tokens * tokens * WIDTH
    block = tokens * per_token + attention + 6 * WIDTH * WIDTH
    rest = WIDTH * WIDTH + 2 * WIDTH * WIDTH + tokens * WIDTH * PATCH
    first = tokens * PATCH * WIDTH + TIME * WIDTH
    return 2 * (passes * (DEPTH * block + rest) + first_passes * first)


def test_forward_count_is_the_hand_computed_one() -> None:
    assert forward_flops_per_row(DiT(**SIZE), SHAPE) == by_hand(backward=False)


def test_training_count_is_the_hand_computed_one() -> None:
    assert training_flops_per_row(DiT(**SIZE), SHAPE) == by_hand(backward=True)


def test_count_is_that_of_a_pass_that_really_computes() -> None:
    model = DiT(**SIZE)
    row = torch.randn(1, *SHAPE), torch.rand(1), torch.tensor([3])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*row).sum().backward()
    assert counter.get_total_flops() == training_flops_per_row(model, SHAPE)


@pytest.mark.parametrize("num_kept", [1, 5, TOKENS])
def test_a_masked_row_costs_its_kept_tokens(num_kept: int) -> None:
    model = DiT(**SIZE, analytic_skip=0.5)
    assert training_flops_per_row(model, SHAPE, num_kept=num_kept) == by_hand(True, num_kept)
    row = torch.randn(1, *SHAPE), torch.rand(1), torch.tensor([3]), torch.arange(num_kept)[None]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*row).sum().backward()
    assert counter.get_total_flops() == by_hand(True, num_kept)


def test_counting_leaves_the_model_alone_and_takes_any_precision() -> None:
    model = DiT(**SIZE).bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert training_flops_per_row(model, SHAPE) == by_hand(backward=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_router_counts_one_token_more_and_a_small_head() -> None:
    router = Router(num_experts=5, **SIZE)
    more_tokens = 2 * DEPTH * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN + 2 * (17 * 17 - 16 * 16) * WIDTH)
    heads = 2 * (WIDTH * 5 - TOKENS * WIDTH * PATCH)
    assert forward_flops_per_row(router, SHAPE) == by_hand(backward=False) + more_tokens + heads


def text_by_hand(tokens: int) -> int:
    """What texts of that many tokens of 10 channels add to a forward pass."""
    block = 2 * TOKENS * WIDTH * WIDTH + 2 * tokens * WIDTH * WIDTH + 2 * TOKENS * tokens * WIDTH
    return 2 * (DEPTH * block + tokens * (10 * WIDTH + WIDTH * WIDTH))


@pytest.mark.parametrize("tokens", [1, 7])
def test_texts_cost_their_projection_and_cross_attention(tokens: int) -> None:
    model = DiT(**{**SIZE, "num_classes": None}, text_dim=10)
    assert forward_flops_per_row(model, SHAPE, tokens) == by_hand(backward=False) + text_by_hand(tokens)
    text = Text(torch.randn(1, tokens, 10), torch.ones(1, tokens, dtype=torch.bool))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, *SHAPE), torch.rand(1), text).sum().backward()
    assert counter.get_total_flops() == training_flops_per_row(model, SHAPE, tokens)


def test_adaln_single_modulates_once_for_all_blocks() -> None:
    saved = 2 * ((DEPTH - 1) * 6 * WIDTH * WIDTH + 2 * WIDTH * WIDTH)
    assert forward_flops_per_row(DiT(**SIZE, adaln="single"), SHAPE) == by_hand(backward=False) - saved


def test_a_model_on_the_meta_device_counts_the_same() -> None:
    with torch.device("meta"):
        model = DiT(**SIZE)
    assert training_flops_per_row(model, SHAPE) == by_hand(backward=True)
    assert num_parameters(model) == num_parameters(DiT(**SIZE))


def test_memory_is_that_of_an_optimizer_that_has_stepped() -> None:
    model = DiT(**SIZE)
    ema = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, *SHAPE), torch.rand(1), torch.tensor([3])).sum().backward()
    optimizer.step()
    kept = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *ema]
    kept += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert sum(tensor.nbytes for tensor in kept) == training_bytes(model)
    assert sum(tensor.nbytes for tensor in model.bfloat16().parameters()) == weights_bytes(model, torch.bfloat16)
