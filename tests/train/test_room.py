"""A network that doesn't fit into a worker's memory."""

import pytest
import torch

from ddm_ray.errors import ConfigError
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from ddm_ray.train import worker

EXPERT = expert(1)


def test_what_does_not_fit_is_told_with_what_makes_it_smaller(
    world_of_one: None, short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any step; it may pass, where an attempt before this one is about to end."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 11.12 GiB.")

    monkeypatch.setattr(worker, "Engine", full)
    words = r"experts/001: .* weights and optimizer, by ZeRO stage 1 on 1 \(CUDA out .* 11.12 GiB\.\); give it more"
    with pytest.raises(ConfigError, match=words) as refused:
        worker.train(short_run.url, EXPERT, TrainPlacement())
    assert refused.value.passes
