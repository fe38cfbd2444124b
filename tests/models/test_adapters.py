"""Adapters: what they add, what is theirs, and rows of several in one call of their base.

Shapes: R rows, I and O channels, r rank.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import velocity_field
from ddm_ray.errors import ConfigError, CorruptArtifact
from ddm_ray.models import weights
from ddm_ray.models.adapters import base_name, is_of_adapter, trained_parameters, trained_state
from ddm_ray.models.flops import forward_flops_per_row, num_parameters
from ddm_ray.models.mixed_adapters import MixedAdapters
from ddm_ray.models.rows import rows_of_zeros
from ddm_ray.models.spec import denoiser_spec
from ddm_ray.sampling import shared_base
from ddm_ray.sampling.request import ExpertCall
from ddm_ray.sampling.shared_base import SharedBase, sharing
from tests.models.test_any_network import IMAGE, SMALL, TOKENS, config_of

pytestmark = pytest.mark.contract


def spec_of(kind: str, targets: tuple[str, ...] = (), alpha: float | None = None) -> dict[str, Any]:
    config = config_of(kind)
    asked = targets or config.expert.model.adapted_layers(config.data)
    return {**denoiser_spec(config), "adapter": {"rank": 2, "alpha": alpha, "targets": [*asked]}}


def base_of(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    base = weights.build(denoiser_spec(config_of(kind)))
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return base.to(dtype).eval()


def adapted(base: nn.Module, spec: dict[str, Any], seed: int) -> nn.Module:
    """The base with a random adapter of this spec."""
    generator = torch.Generator().manual_seed(seed)
    own = trained_state(weights.build(spec))
    tensors: dict[str, Tensor] = {
        name: 0.3 * torch.randn(each.shape, generator=generator) for name, each in own.items()
    }
    data, described = weights.weights_as_bytes(tensors, spec)
    assert len(data) < 4 * sum(each.numel() for each in tensors.values()) + 2**14 and described
    return weights.load_model(spec, data, base).to(next(base.parameters()).dtype)


def rows(network: nn.Module, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Any]:
    zeros_BCHW, _, condition = rows_of_zeros(network, count, IMAGE, TOKENS)
    generator = torch.Generator().manual_seed(3)
    x_BCHW = torch.randn(zeros_BCHW.shape, generator=generator).to(dtype)
    return x_BCHW, torch.rand(count, generator=generator).to(dtype), condition


@torch.no_grad()
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize(("targets", "alpha"), [((), None), ((), 8.0)])
def test_it_adds_its_product_to_the_weights(kind: str, targets: tuple[str, ...], alpha: float | None) -> None:
    base, spec = base_of(kind, torch.float64), spec_of(kind, targets, alpha)
    network = adapted(base, spec, 1)
    own, merged = trained_state(network), base_of(kind, torch.float64)
    for name in own:
        if "lora_A" in name:
            layer = merged.get_submodule(name.partition(".lora_A")[0])
            added_OI = own[name.replace("lora_A", "lora_B")] @ own[name]
            layer.weight += (2 if alpha is None else alpha) / 2 * added_OI  # type: ignore[operator]
    given = rows(base, 3, torch.float64)
    assert (network(*given) - base(*given)).abs().max() > 1e-3
    torch.testing.assert_close(network(*given), merged(*given), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("kind", SMALL)
def test_a_new_one_changes_nothing_and_only_it_is_trained(kind: str) -> None:
    base, spec = base_of(kind), spec_of(kind)
    fresh = weights.build(spec)
    network = weights.from_state(spec, trained_state(fresh), base)
    given = rows(base, 2)
    assert torch.equal(network(*given), base(*given))
    trained = {name for name, each in fresh.named_parameters() if each.requires_grad}
    assert trained == {*trained_parameters(fresh)} == {*trained_state(fresh)} and all(map(is_of_adapter, trained))
    others = [name for name in network.state_dict() if not is_of_adapter(name)]
    assert sorted(map(base_name, others)) == sorted(base.state_dict())
    assert num_parameters(fresh) == sum(each.numel() for each in trained_state(fresh).values()) < num_parameters(base)
    meta = weights.build(spec, "meta")
    assert all(each.is_meta for each in meta.parameters()) and trained_state(meta).keys() == trained_state(fresh).keys()
    assert forward_flops_per_row(meta, IMAGE, TOKENS) > forward_flops_per_row(base, IMAGE, TOKENS)


def test_its_base_is_in_memory_once() -> None:
    base, spec = base_of("DiT"), spec_of("DiT")
    places = [
        {each.data_ptr() for name, each in adapted(base, spec, seed).state_dict().items() if not is_of_adapter(name)}
        for seed in (1, 2)
    ]
    assert places[0] == places[1] == {each.data_ptr() for each in base.state_dict().values()}


@torch.no_grad()
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("flow", [Flow(), Flow("cosine", "noise")])
def test_rows_of_several_adapters_are_one_call(kind: str, flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    base, spec = base_of(kind), spec_of(kind, alpha=3.0)
    networks = [adapted(base, spec, seed) for seed in range(3)]
    single = [velocity_field(adapted(base, spec, seed), flow) for seed in range(3)]
    shared = SharedBase(
        [velocity_field(networks[0], flow), None, *(velocity_field(each, flow) for each in networks[1:])]
    )
    x_RCHW, t_R, condition = rows(base, 7)
    parts = [(0, slice(0, 2)), (3, slice(2, 3)), (2, slice(3, 7))]
    calls = [ExpertCall(expert, x_RCHW[part], t_R[part], condition[part]) for expert, part in parts]
    called = list[int]()
    forward = type(base).forward
    monkeypatch.setattr(type(base), "forward", lambda own, *given: called.append(len(given[0])) or forward(own, *given))
    answers = shared.together(calls)
    assert called == [7] and len(shared) == 4 and shared[1] is None
    for call, answer in zip(calls, answers, strict=True):
        given, number = (call.x_BCHW, call.t_B, call.condition), max(0, call.expert - 1)
        alone, by_itself = single[number](*given), shared[call.expert]
        assert by_itself is not None
        torch.testing.assert_close(answer, alone, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(by_itself(*given), alone, atol=2e-5, rtol=1e-4)
        assert (alone - single[(number + 1) % 3](*given)).abs().max() > 1e-2
    stacked = {each.untyped_storage().data_ptr() for each in shared._mixed.buffers()}
    assert all(each.untyped_storage().data_ptr() in stacked for one in networks for each in trained_state(one).values())


def test_what_no_layer_is_called_is_named() -> None:
    with pytest.raises(ConfigError, match=r"adapter.targets: 'qvk' is no linear layer of the network: it has fc1, "):
        weights.build(spec_of("DiT", targets=("qkv", "qvk")))
    only = trained_state(weights.build(spec_of("DiT", targets=("attention.qkv",))))
    assert len(only) == 4 and all("attention.qkv.lora_" in name for name in only)
    with pytest.raises(ConfigError, match="linear layer"):  # it computes more than a product
        weights.build(spec_of("DiT", targets=("modulation",)))


def test_without_its_base_it_is_refused() -> None:
    spec = spec_of("DiT")
    data, _ = weights.weights_as_bytes(weights.build(spec), spec)
    with pytest.raises(CorruptArtifact, match="it needs its base, and there is none"):
        weights.load_model(spec, data)
    with pytest.raises(CorruptArtifact, match="weights lack the tensor"):
        weights.load_model(weights.base_spec(spec), data)


@torch.no_grad()
def test_a_large_call_is_cut_and_what_moves_stays_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    base, spec = base_of("DiT"), spec_of("DiT")
    networks = [adapted(base, spec, seed) for seed in range(2)]
    shared = sharing(networks)
    assert isinstance(shared, SharedBase) and sharing([base, base]) == [base, base]
    x_RCHW, t_R, condition = rows(base, 14)
    calls = [ExpertCall(0, x_RCHW[:6], t_R[:6], condition[:6]), ExpertCall(1, x_RCHW[6:], t_R[6:], condition[6:])]
    together = shared.together(calls)
    monkeypatch.setattr(shared_base, "ROWS_AT_ONCE", 7)
    called = list[int]()
    forward = type(base).forward
    monkeypatch.setattr(type(base), "forward", lambda own, *given: called.append(len(given[0])) or forward(own, *given))
    for one, other in zip(shared.together(calls), together, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert called == [6, 8], "one alone has as many as a shared call, and the others are one"
    called.clear()
    monkeypatch.setattr(shared_base, "ROWS_AT_ONCE", 9)
    shared.together(calls)
    assert called == [9, 5]
    shared.to("cpu", torch.bfloat16)
    assert {each.dtype for each in base.parameters()} == {torch.bfloat16}
    stacked = {each.untyped_storage().data_ptr() for each in shared._mixed.buffers()}
    assert all(each.untyped_storage().data_ptr() in stacked for one in networks for each in trained_state(one).values())
    assert shared.together(calls)[1].dtype == torch.bfloat16


def test_tables_that_no_file_has_are_the_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    base, spec = base_of("DiT"), spec_of("DiT")
    base.trunk.positions_1ND = base.trunk.positions_1ND + 1.0  # type: ignore[operator, union-attr]
    networks = [adapted(base, spec, seed) for seed in range(2)]
    mixed = MixedAdapters(networks)
    assert all(each.trunk.positions_1ND is base.trunk.positions_1ND for each in (mixed.network, *networks))  # type: ignore[union-attr]


@torch.no_grad()
def test_tables_move_with_the_base() -> None:
    base, spec = base_of("DiT"), spec_of("DiT")
    shared = sharing([adapted(base, spec, seed) for seed in range(2)])
    assert isinstance(shared, SharedBase)
    shared.to("cpu", torch.float64)
    tables = [each.trunk.positions_1ND for each in (base, shared._mixed.network, shared[0], shared[1])]  # type: ignore[union-attr]
    assert tables[0].dtype == torch.float64 and all(each is tables[0] for each in tables[1:])


def test_an_adapter_of_another_network_is_refused() -> None:
    spec = spec_of("DiT")
    data, _ = weights.weights_as_bytes(weights.build(spec), spec)
    wider = {**weights.base_spec(spec), "config": {**spec["config"], "depth": 3}}
    with pytest.raises(CorruptArtifact, match="an adapter of another network than this base"):
        weights.load_model(spec, data, weights.build(wider))
