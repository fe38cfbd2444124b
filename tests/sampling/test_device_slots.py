"""Weights in blocks of memory: the same answers, one copy a fetch, nobody waits and nobody reads too early."""

import copy
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from ddm_ray.config import SamplingSettings
from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import VelocityField
from ddm_ray.models.dit import DiT
from ddm_ray.sampling import driver
from ddm_ray.sampling.device_slots import AsyncFetch, DeviceSlot
from ddm_ray.sampling.offload import OffloadedToHost
from ddm_ray.sampling.packed_weights import ALIGNMENT, PackedWeights
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from tests.models.test_diffusers_transformer import ARGUMENTS, network, rows
from tests.pretend_streams import PretendStreams, pretended
from tests.sampling.test_waits import WAITS

K = 5
INFO = MixtureInfo.from_counts(torch.ones(4, K), image_shape=(1, 4, 4))
SIZE = {"image_size": 4, "channels": 1, "num_classes": 3, "patch_size": 2, "width": 8, "depth": 1, "heads": 2}


def expert(number: int, **changes: object) -> DiT:
    """A small DiT whose every parameter is random."""
    torch.manual_seed(number)
    model = DiT(**SIZE | changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


EXPERTS = [expert(number) for number in range(K)]


def router(x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
    return 3 * x_BCHW.flatten(1)[:, :K] + label_B.to(x_BCHW.dtype)[:, None]


def request(strategy: str, steps: int = 4) -> SampleRequest:
    cluster_B = torch.arange(6) % K if strategy == "oracle" else None
    chosen = SamplingSettings(strategy=strategy, steps=steps, guidance_scale=2.0)
    return SampleRequest(tuple(range(6)), torch.arange(6) % 3, chosen, cluster_B)


def offloaded(device: str = "cpu", resident: int = 2, **others: object) -> OffloadedToHost:
    return OffloadedToHost(lambda number: EXPERTS[number], [True] * K, device, resident, **others)


@pytest.mark.parametrize("strategy", WAITS)
def test_images_are_those_of_resident_experts_to_the_bit(strategy: str) -> None:
    right = driver.sample(request(strategy), INFO, EXPERTS, router)
    for resident in (2, K + 2):
        experts = offloaded(resident=resident)
        for _ in range(2):
            sampled = driver.sample(request(strategy), INFO, experts, router)
            assert torch.equal(sampled.images_BCHW, right.images_BCHW)
        assert resident == 2 or experts.num_fetched <= K


@pytest.mark.parametrize(("strategy", "resident"), [("once", 2), ("top-1", 2), ("full", 2), ("full", 3)])
def test_on_a_gpu_a_fetch_is_one_copy_for_which_the_host_never_waits(strategy: str, resident: int) -> None:
    waits = []
    for steps in (2, 4):
        with pretended() as gpu:
            experts = offloaded("meta", resident)
            slots = list(experts._free)
            before = addresses(slots)
            sampled = driver.sample(request(strategy, steps), INFO, experts, router, "meta")
            size = PackedWeights(EXPERTS[0]).num_bytes
            assert [made for num_bytes, made in gpu.uploads if num_bytes >= size] == [True] * experts.num_fetched
            assert sum(num_bytes for num_bytes, _ in gpu.uploads if num_bytes < size) < size
            assert addresses(slots) == before and {*experts._free, *experts._slots.values()} == set(slots)
            assert not gpu.races
            waits.append(gpu.waits.total())
        right = driver.sample(request(strategy, steps), INFO, EXPERTS, router)
        torch.testing.assert_close(sampled.images_BCHW, right.images_BCHW)
    assert (waits[1] - waits[0]) / 2 == WAITS[strategy], gpu.waits


def addresses(slots: list[DeviceSlot]) -> list[int]:
    """Where all lies that the slots' networks compute with."""
    made = [network for slot in slots for network in slot.networks.values()]
    return [part.inner.data_ptr() for network in made for part in (*network.parameters(), *network.buffers())]


@pytest.mark.parametrize("strategy", ["top-1", "full"])
@pytest.mark.parametrize(("owner", "step"), [(AsyncFetch, "wait"), (DeviceSlot, "was_read")])
def test_what_reads_or_writes_too_early_would_be_found(
    strategy: str, owner: type, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, step, lambda self: None)
    with pretended() as gpu:
        driver.sample(request(strategy), INFO, offloaded("meta"), router, "meta")
        assert gpu.races


@pytest.mark.parametrize("on_gpu", [False, True])
def test_it_tells_what_each_fetch_took_and_who_waited_for_it(on_gpu: bool) -> None:
    fetches: list[tuple[int, float, float]] = []

    def fetch_some(gpu: PretendStreams | None) -> None:
        experts = offloaded("meta" if gpu else "cpu")
        experts.on_fetch = lambda *fetch: fetches.append(fetch)
        experts.prefetch(3)
        experts.prefetch(1)
        if gpu:
            gpu.behind = True
            assert not experts.arrived(1)
            experts.measure()
            assert not fetches
            gpu.behind, gpu.now = False, 100.0
        assert experts.arrived(1)
        field = experts[1]
        if gpu:
            field(*(part.to("meta") for part in (torch.zeros(1, 1, 4, 4), torch.zeros(1), torch.zeros(1).long())))
        experts.prefetch(2)
        experts.measure()

    if on_gpu:
        with pretended() as gpu:
            fetch_some(gpu)
        assert [(number, round(seconds)) for number, seconds, _ in fetches] == [(3, 1), (1, 1)]
        assert [waited for *_, waited in fetches] == [0.0, 0.0]
    else:
        fetch_some(None)
        assert [number for number, *_ in fetches] == [3, 1, 2]
        assert all(seconds == waited > 0 for _, seconds, waited in fetches)


def test_who_is_asked_for_before_it_came_was_waited_for() -> None:
    fetches: list[tuple[int, float, float]] = []
    with pretended():
        experts = offloaded("meta")
        experts.on_fetch = lambda *fetch: fetches.append(fetch)
        experts.prefetch(0)
        fetch = experts._fetches[0]
        fetch.wait()
        fetch._ended.at += 4.0  # its copy goes on
        experts.measure()
    assert fetches == [(0, 5.0, 4.0)]


@pytest.mark.parametrize(
    "model",
    [
        expert(0),
        expert(0, adaln="single", depth=2),
        VelocityField(expert(0), Flow("cosine", "noise")),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).eval(),
        *(network(name) for name in ARGUMENTS),
    ],
    ids=lambda model: type(model).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_stay_to_the_bit(model: nn.Module, dtype: torch.dtype) -> None:
    inputs = {"DiffusersTransformer": rows(), "Sequential": (torch.randn(4, 1, 4, 4, dtype=dtype),)}.get(
        type(model).__name__, (torch.randn(4, 1, 4, 4), torch.rand(4), torch.arange(4))
    )
    model = copy.deepcopy(model).to(dtype)
    flat = PackedWeights(model)
    made = flat.network(flat.block(model))
    with torch.inference_mode():
        assert torch.equal(made(*inputs), model(*inputs))


def test_tensors_lie_where_libraries_like_them_and_tied_ones_are_one() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    tied[1].weight = tied[0].weight
    flat = PackedWeights(tied)
    block = flat.block(tied)
    made = flat.network(block)
    assert made[0].weight is made[1].weight and made[2].num_batches_tracked.dtype == torch.int64
    assert all((part.data_ptr() - block.data_ptr()) % ALIGNMENT == 0 for part in made.state_dict().values())
    assert all(torch.equal(part, made.state_dict()[name]) for name, part in tied.state_dict().items())
    assert tied[0].weight.data_ptr() != made[0].weight.data_ptr()


def test_experts_of_several_forms_share_the_slots() -> None:
    """Two sizes, and two flows of the same tensors."""
    mixed = [expert(0), VelocityField(expert(1), Flow("cosine")), expert(2, width=16), expert(3), EXPERTS[4]]
    mixed[3] = VelocityField(mixed[3], Flow("ddpm", "noise"))
    experts = OffloadedToHost(lambda number: mixed[number], [True] * K, "cpu")
    right = driver.sample(request("full"), INFO, mixed, router)
    assert torch.equal(driver.sample(request("full"), INFO, experts, router).images_BCHW, right.images_BCHW)
    assert len(experts._forms) == 4 and len({id(slot.block) for slot in experts._free}) == 0


def test_a_fetch_that_fails_is_told_where_the_expert_is_called_and_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, inputs = offloaded(), (torch.randn(2, 1, 4, 4), torch.rand(2), torch.arange(2))
    broken, fetch = experts.packed[2].block, DeviceSlot.fetch

    def failing(slot: DeviceSlot, form: PackedWeights, source: Tensor) -> object:
        if source is broken:
            raise RuntimeError("CUDA error")
        return fetch(slot, form, source)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceSlot, "fetch", failing)
        for number in (0, 2, 1, 2, 2, 0):
            experts.prefetch(number)
            with suppress(RuntimeError):
                assert torch.equal(experts[number](*inputs), EXPERTS[number](*inputs)) and number != 2
        with pytest.raises(RuntimeError, match="CUDA error"):
            experts[2]
    assert torch.equal(experts[2](*inputs), EXPERTS[2](*inputs))


def test_nobody_computes_with_weights_that_have_left() -> None:
    experts = offloaded()
    held = experts[0]
    experts.prefetch(1)
    experts.prefetch(2, leaving=0)
    assert experts.here == [1, 2]
    with pytest.raises(AssertionError, match="expert 0 has left"):
        held(torch.randn(2, 1, 4, 4), torch.rand(2), torch.arange(2))
