"""Memory of a worker: whether its part of a job's weights and optimizer fits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ddm_ray.errors import ConfigError
from ddm_ray.models import weights
from ddm_ray.models.flops import num_parameters
from ddm_ray.placement import TrainPlacement
from ddm_ray.spelling import one_line
from ddm_ray.train.estimate import bytes_a_parameter
from ddm_ray.train.failures import is_out_of_memory
from ddm_ray.train.job import TrainJob


@contextmanager
def fitting_state(job: TrainJob, placement: TrainPlacement, device: torch.device) -> Iterator[None]:
    """Turn running out of memory, while an engine is made, into a ConfigError.

    The error passes: an attempt before this one may still hold some memory. It is raised at once if a GPU's whole
    memory is less than the state takes.
    """
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        require_state_fits(job, placement, dist.get_world_size(), memory)
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        full = ConfigError(
            f"{job.artifact}: a worker's memory is too small for its weights and optimizer, by ZeRO stage"
            f" {placement.zero_stage} on {placement.workers.max} ({one_line(error, 200)}); give it more workers, or a"
            " higher zero_stage"
        )
        full.passes = True
        raise full from None


def require_state_fits(job: TrainJob, placement: TrainPlacement, workers: int, memory: int) -> None:
    """Raise ConfigError if one of so many workers' part of the state is more than a GPU's memory, in bytes.

    The error passes if the part would fit with as many workers as the placement asks for: more of them may come.
    """
    parameters = num_parameters(weights.build(job.spec, "meta"))

    def part(workers: int) -> float:
        each = bytes_a_parameter(job.train.precision, workers, use_gpu=True)[placement.zero_stage]
        return (each or 0) * parameters

    if part(workers) > memory:
        full = ConfigError(
            f"{job.artifact}: a worker's GPU has {memory / 1e9:.1f} GB, weights and optimizer take"
            f" {part(workers) / 1e9:.1f} GB of each of {workers}, by ZeRO stage {placement.zero_stage}",
            "give it more workers, a higher zero_stage, or a larger GPU in the islands' file",
        )
        full.passes = part(placement.workers.max) <= memory
        raise full
