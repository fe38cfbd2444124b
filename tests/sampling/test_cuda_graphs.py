"""Networks as CUDA graphs, on graphs that are pretended: what is captured is never called again, and answers stay."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition
from ddm_ray.sampling.buckets import Buckets, bucket_sizes
from ddm_ray.sampling.cuda_graphs import WARM_UPS, Graphs
from tests.models.test_text_condition import CLASSES, NETWORKS, TEXT, perturbed
from tests.pretend_graphs import PretendCUDA
from tests.sampling.test_buckets import FIELDS, MOST, POOLED, call


@pytest.fixture
def cuda() -> Iterator[PretendCUDA]:
    with pytest.MonkeyPatch.context() as patch:
        yield PretendCUDA(patch)


def captured(graphs: Graphs, network: nn.Module, most: int = MOST) -> Buckets:
    return Buckets({size: graphs.captured(network, size) for size in reversed(bucket_sizes(most))})


@pytest.mark.parametrize("kind", [CLASSES, TEXT, POOLED], ids=["labels", "texts", "pooled texts"])
def test_answers_are_the_networks_own_and_stay_when_others_run(cuda: PretendCUDA, kind: dict) -> None:
    """Of networks that share inputs and memory, for any number of rows, in any order."""
    networks = [perturbed(of, **(TEXT if kind is POOLED else kind)) for of in NETWORKS]
    graphs = Graphs(*call(kind, MOST))
    in_buckets = [captured(graphs, network) for network in networks]
    num_captures = len(cuda.captures)
    assert num_captures == 2 * len(bucket_sizes(MOST))
    asked = [(number, count) for count in (3, 1, MOST, 2, 2 * MOST + 1, 5, 4, 1) for number in (0, 1)]
    inputs = [call(kind, count) for _, count in asked]
    answers = [in_buckets[number](*each) for (number, _), each in zip(asked, inputs, strict=True)]
    for (number, _), each, answer in zip(asked, inputs, answers, strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(answer, networks[number](*each), rtol=0, atol=1e-5)
    assert len(cuda.captures) == num_captures


def test_a_captured_network_is_not_called_again(cuda: PretendCUDA) -> None:
    network, calls = perturbed(**CLASSES), list[int]()
    network.register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    field = captured(Graphs(*call(CLASSES, MOST)), network)
    assert calls == [size for size in sorted(bucket_sizes(MOST), reverse=True) for _ in range(WARM_UPS + 1)]
    calls.clear()
    for count in range(1, 2 * MOST):
        field(*call(CLASSES, count))
    assert not calls


@pytest.mark.parametrize(("build", "kind"), FIELDS.values(), ids=FIELDS)
def test_every_way_to_call_a_network_can_be_captured(
    cuda: PretendCUDA, build: Callable[[], nn.Module], kind: dict
) -> None:
    """Nothing in it depends on values that the host would have to wait for."""
    network = build()
    same_as(network, captured(Graphs(*call(kind, 2)), network, 2), call(kind, 2))


def same_as(network: nn.Module, field: Buckets, inputs: tuple[Tensor, Tensor, Condition]) -> None:
    x_BCHW, t_B, condition = inputs
    other = x_BCHW.flip(0), t_B.flip(0), condition
    for each in (inputs, other):
        answer = field(*each)
        with torch.inference_mode():
            torch.testing.assert_close(answer, network(*each), rtol=1e-5, atol=1e-5)


def test_a_network_lives_as_long_as_its_graphs(cuda: PretendCUDA) -> None:
    """A graph knows the addresses of its weights, and keeps none of them."""
    network = perturbed(**CLASSES)
    here, field = weakref.ref(network), captured(Graphs(*call(CLASSES, 2)), network, 2)
    del network
    gc.collect()
    assert here() is not None
    del field
    gc.collect()
    assert here() is None


def test_inputs_of_another_shape_are_not_taken(cuda: PretendCUDA) -> None:
    network = perturbed(**TEXT)
    field = captured(Graphs(*call(TEXT, 2)), network, 2)
    x_BCHW, t_B, text = call(TEXT, 2)
    with pytest.raises(AssertionError):
        field(x_BCHW, t_B, type(text)(text.tokens_BLE[:, :1], text.mask_BL[:, :1]))


class BetweenOthers:
    """A lock before and after whose holder another one has its turn."""

    def __init__(self, other: Callable[[], object]):
        self._other, self.num_turns = other, 0

    def __enter__(self) -> None:
        self._other()
        self.num_turns += 1

    def __exit__(self, *error: object) -> None:
        self._other()


def test_networks_take_turns_whichever_threads_call_them(cuda: PretendCUDA) -> None:
    """Since they share the places of their inputs."""
    networks = [perturbed(of, **CLASSES) for of in (*NETWORKS, NETWORKS[0])]
    graphs, (x_BCHW, t_B, label_B) = Graphs(*call(CLASSES, 2)), call(CLASSES, 2)
    other = captured(graphs, networks[2], 2)
    graphs._replaying = turns = BetweenOthers(lambda: other(x_BCHW + 5, 1 - t_B, label_B.flip(0)))
    for number, network in enumerate(networks[:2]):
        same_as(network, captured(graphs, network, 2), (x_BCHW, t_B, label_B))
        assert turns.num_turns == 2 * (number + 1)
