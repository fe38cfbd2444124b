import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import forward_flops_per_row, training_flops_per_row
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


def by_hand(backward: bool) -> int:
    """Two FLOPs per multiply-add; backward is twice forward, but inputs that need no gradient cost once."""
    passes, first_passes = (3, 2) if backward else (1, 1)
    per_token = 4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN
    attention = 2 * TOKENS * TOKENS * WIDTH
    block = TOKENS * per_token + attention + 6 * WIDTH * WIDTH
    rest = WIDTH * WIDTH + 2 * WIDTH * WIDTH + TOKENS * WIDTH * PATCH
    first = TOKENS * PATCH * WIDTH + TIME * WIDTH
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
