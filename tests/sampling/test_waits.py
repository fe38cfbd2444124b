"""Waits of the host for a GPU, on one that is pretended: what each costs a step, and that nothing mixes devices."""

import pytest
import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.errors import NotFiniteError
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import MixtureInfo, SampleRequest, SampleResult
from tests.pretend_gpu import PretendGPU

INFO = MixtureInfo.from_counts(torch.ones(4, 5), image_shape=(1, 4, 4))
WAITS = {"once": 0, "oracle": 0, "full": 0, "top-1": 1, "top-2": 1, "sticky": 1, "nucleus-0.9": 1, "sample-2": 1}


def expert(number: int) -> driver.Field:
    return lambda x, t, label: x * (0.1 * number + t.view(-1, 1, 1, 1)) - 0.05 * label.to(x.dtype).view(-1, 1, 1, 1)


def router(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return 3 * x.flatten(1)[:, :5] + label.to(x.dtype)[:, None]


EXPERTS = [expert(number) for number in range(5)]


def request(strategy: str, num_images: int, **fields) -> SampleRequest:
    cluster_B = torch.arange(num_images) % 5 if strategy == "oracle" else None
    chosen = SamplingSettings(strategy=strategy, **fields)
    return SampleRequest(tuple(range(num_images)), torch.arange(num_images) % 3, chosen, cluster_B)


def on_gpu(
    asked: SampleRequest, info: MixtureInfo = INFO, experts: driver.Experts = EXPERTS, router: driver.Field = router
) -> tuple[SampleResult, PretendGPU]:
    with PretendGPU() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: gpu.pinned(tensor))
        return driver.sample(asked, info, experts, router, "meta"), gpu


@pytest.mark.parametrize("strategy", WAITS)
@pytest.mark.parametrize(("num_images", "scale"), [(1, 1.0), (3, 2.5), (16, 2.5)])
def test_a_step_waits_as_often_at_any_batch(strategy: str, num_images: int, scale: float) -> None:
    few, many = (
        on_gpu(request(strategy, num_images, steps=steps, solver="euler", guidance_scale=scale))[1] for steps in (2, 6)
    )
    assert (many.waits.total() - few.waits.total()) / 4 == WAITS[strategy], (few.waits, many.waits)
    assert few.waits.total() - 2 * WAITS[strategy] <= 6, few.waits


def test_a_routers_temperature_makes_no_step_wait() -> None:
    few, many = (on_gpu(request("full", 3, steps=steps, router_temperature=1.5))[1] for steps in (2, 6))
    assert many.waits == few.waits


def broken(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


def torn(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return torch.full_like(router(x, t, label), torch.nan)


def test_what_is_not_finite_is_found_at_the_end() -> None:
    """By whatever part, and if another expert is missing."""
    without = INFO.with_available(torch.arange(5) != 1)
    for info in (INFO, without):
        with pytest.raises(NotFiniteError):
            on_gpu(request("full", 2, steps=2), info, [broken] * 5)
        with pytest.raises(NotFiniteError):
            on_gpu(request("full", 2, steps=2), info, EXPERTS, torn)
    x_BCHW = torch.zeros(2, 1, 4, 4)
    with PretendGPU() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: gpu.pinned(tensor))
        with pytest.raises(NotFiniteError):
            driver.mixture_velocity(x_BCHW, 0.5, torch.tensor([0, 1]), INFO, [broken] * 5, router, "meta")


def test_an_expert_that_nobody_weighs_may_say_anything() -> None:
    def never_4(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        return torch.where(torch.arange(5).to(x.device, non_blocking=True) == 4, -torch.inf, router(x, t, label))

    asked, experts = request("full", 3, steps=3), [*EXPERTS[:4], broken]
    actual, _ = on_gpu(asked, INFO, experts, never_4)
    right = driver.sample(asked, INFO, experts, never_4)
    torch.testing.assert_close(actual.images_BCHW, right.images_BCHW)


@pytest.mark.parametrize("strategy", WAITS)
@pytest.mark.parametrize("missing", [False, True])
def test_images_are_the_cpus(strategy: str, missing: bool) -> None:
    info = INFO.with_available(torch.arange(5) != (4 if strategy == "oracle" else 1)) if missing else INFO
    asked = request(strategy, 4, steps=5, solver="heun", guidance_scale=2.0, guidance_interval=(0.2, 0.7))
    actual, _ = on_gpu(asked, info)
    right = driver.sample(asked, info, EXPERTS, router)
    torch.testing.assert_close(actual.images_BCHW, right.images_BCHW)
    torch.testing.assert_close(actual.routing_SBK, right.routing_SBK)


def test_what_waits_is_counted() -> None:
    with PretendGPU() as gpu:
        x = torch.ones(3).to("meta")
        assert float(x.sum()) == 3
        assert x[torch.tensor([0, 1])].cpu().tolist() == [1, 1]
        assert len(x[x > 0]) == 3
        with pytest.raises(RuntimeError, match="at once"):
            _ = x + torch.ones(3)
    assert gpu.waits.total() == 5
