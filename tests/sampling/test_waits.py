"""Waits of the host for a GPU, on one that is pretended: what each costs a step, and that nothing mixes devices."""

import pytest
import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings
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


def on_gpu(asked: SampleRequest, info: MixtureInfo = INFO) -> tuple[SampleResult, PretendGPU]:
    with PretendGPU() as gpu:
        result = driver.sample(asked, info, EXPERTS, router, "meta")
    return result, gpu


@pytest.fixture(autouse=True)
def nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a driver torch can't pin memory; the copy that follows is one that doesn't wait all the same.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@pytest.mark.parametrize("strategy", WAITS)
@pytest.mark.parametrize(("num_images", "scale"), [(1, 1.0), (3, 2.5), (16, 2.5)])
def test_a_step_waits_as_often_at_any_batch(strategy: str, num_images: int, scale: float) -> None:
    few, many = (
        on_gpu(request(strategy, num_images, steps=steps, solver="euler", guidance_scale=scale))[1] for steps in (2, 6)
    )
    assert (many.waits.total() - few.waits.total()) / 4 == WAITS[strategy], (few.waits, many.waits)
    assert few.waits.total() - 2 * WAITS[strategy] <= 6, few.waits


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
        with pytest.raises(RuntimeError, match="at once"):
            _ = x + torch.ones(3)
    assert gpu.waits.total() == 4
