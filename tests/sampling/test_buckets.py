"""Calls in a few sizes: what is padded changes nothing, and a GPU is waited for by none of it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import MatchedRouter, VelocityField
from ddm_ray.sampling.buckets import Buckets, Padded, bucket_sizes
from ddm_ray.sampling.driver import Field
from tests.models.test_diffusers_transformer import NAMES, PIXART
from tests.models.test_diffusers_transformer import network as of_diffusers
from tests.models.test_text_condition import CLASSES, NETWORKS, TEXT, TEXT_DIM, TOKENS, perturbed
from tests.pretend_gpu import OnGPU, PretendGPU

POOLED = {**TEXT, "pooled": True}
KINDS = {"labels": CLASSES, "texts": TEXT, "pooled texts": POOLED}
MOST = 6


@given(st.integers(1, 3000), st.data())
def test_less_than_a_third_of_a_call_is_padding(most: int, data: st.DataObject) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert len(sizes) <= 2 * most.bit_length()
    count = data.draw(st.integers(1, most))
    size = min(size for size in sizes if size >= count)
    assert size - count < size / 3


def call(kind: dict, count: int) -> tuple[Tensor, Tensor, Condition]:
    """Inputs of a network; rows are drawn one after another, so that a smaller call has the first of a larger one."""
    draw = torch.Generator().manual_seed(5)
    x_BCHW, t_B = torch.randn(count, 2, 8, 8, generator=draw), torch.linspace(0.9, 0.1, count)
    if kind is CLASSES:
        return x_BCHW, t_B, torch.arange(count) % 4
    text = Text(
        torch.randn(count, TOKENS, TEXT_DIM, generator=draw),
        torch.arange(TOKENS) <= (torch.arange(count) % TOKENS)[:, None],
        torch.randn(count, 3, generator=draw) if kind is POOLED else None,
    )
    return x_BCHW, t_B, text


def padded(network: Field, most: int = MOST) -> Buckets:
    return Buckets({size: Padded(network, size) for size in bucket_sizes(most)})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("of", NETWORKS)
def test_each_number_of_rows_has_the_plain_networks_answer(of: Callable[..., nn.Module], kind: dict) -> None:
    network = perturbed(of, **(TEXT if kind is POOLED else kind))
    in_buckets, seen = padded(network), list[int]()
    network.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    for count in range(1, 2 * MOST + 2):
        inputs = call(kind, count)
        answer = in_buckets(*inputs)
        assert set(seen) <= set(in_buckets.sizes)
        with torch.inference_mode():
            torch.testing.assert_close(answer, network(*inputs), rtol=0, atol=1e-5)
        seen.clear()


def router() -> nn.Module:
    return perturbed(NETWORKS[1], **CLASSES)


FIELDS: dict[str, tuple[Callable[[], nn.Module], dict]] = {
    "labels": (lambda: perturbed(analytic_skip=0.5, **CLASSES), CLASSES),
    "texts": (lambda: perturbed(**TEXT), TEXT),
    "router": (router, CLASSES),
    "noise of ddpm": (lambda: VelocityField(perturbed(**CLASSES), Flow("ddpm", "noise")), CLASSES),
    "score of cosine": (lambda: VelocityField(perturbed(**TEXT), Flow("cosine", "score")), TEXT),
    "router of ddpm": (lambda: MatchedRouter(router(), "ddpm"), CLASSES),
}
"""Networks as sampling calls them, and their kinds of conditions."""


@pytest.mark.parametrize(("build", "kind"), FIELDS.values(), ids=FIELDS)
def test_rows_are_independent_even_of_one_that_is_broken(build: Callable[[], nn.Module], kind: dict) -> None:
    network = build()
    x_BCHW, t_B, condition = call(kind, 4)
    right = network(x_BCHW, t_B, condition)
    x_BCHW[2] = torch.nan
    torch.testing.assert_close(network(x_BCHW, t_B, condition)[[0, 1, 3]], right[[0, 1, 3]], rtol=0, atol=1e-6)


class CopiedToGPU:
    """A network with its tensors on the pretended device."""

    def __init__(self, network: nn.Module):
        self._network = network
        named = [*network.named_parameters(), *network.named_buffers()]
        self._tensors = {name: OnGPU(tensor.detach()) for name, tensor in named}

    def __call__(self, *inputs: object) -> Tensor:
        return torch.func.functional_call(self._network, self._tensors, inputs)


def on_gpu(inputs: tuple[Tensor, Tensor, Condition]) -> tuple[Tensor, Tensor, Condition]:
    x_BCHW, t_B, condition = inputs
    return x_BCHW.to("meta"), t_B.to("meta"), condition.to("meta")


@pytest.mark.parametrize(("build", "kind"), FIELDS.values(), ids=FIELDS)
def test_nothing_waits_for_a_gpu_and_what_is_padded_is_made_there(build: Callable[[], nn.Module], kind: dict) -> None:
    network = build()
    with torch.inference_mode():
        right = network(*call(kind, 5))
        with PretendGPU() as gpu:
            in_buckets, inputs = padded(CopiedToGPU(network)), on_gpu(call(kind, 5))
            in_buckets(*inputs)  # tables are made at the first use
            gpu.waits.clear()
            answer = in_buckets(*inputs)
            assert not gpu.waits
            torch.testing.assert_close(answer.cpu(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_transformer_of_diffusers_waits_for_nothing_either(name: str) -> None:
    sizes = {"use_additional_conditions": True, "num_attention_heads": 3, "cross_attention_dim": 48}
    network = of_diffusers(name, **sizes if name == PIXART else {})
    text = Text(torch.randn(3, 7, 12), torch.arange(7) < torch.tensor([[7], [4], [1]]), torch.randn(3, 10))
    inputs = torch.randn(3, 4, 8, 8), torch.tensor([0.0, 0.4, 1.0]), text
    with torch.inference_mode():
        right = network(*inputs)
        with PretendGPU() as gpu:
            copies, copied = on_gpu(inputs), CopiedToGPU(network)
            gpu.waits.clear()
            answer = copied(*copies)
            assert not gpu.waits, gpu.waits
            torch.testing.assert_close(answer.cpu(), right, rtol=1e-5, atol=1e-5)
