"""Estimates of a training before it runs: memory of its state by ZeRO stage, and time and MFU of a step on a GPU."""

from dataclasses import dataclass

from ddm_ray.train.hardware import named_peak

_FP32_RECORDS, _GRADIENT = 16, 4
OPTIMIZER_BYTES = 68
"""Bytes a parameter that the optimizer moves in a step, uncompiled: held by tests/train/test_optimizer.py."""


@dataclass(frozen=True)
class Card:
    """A GPU: torch's name for the `device`, its memory in bytes, and the speeds that programs reach on it.

    `share`: of its bf16 peak, by the passes of DiT-XL/2 as its kernels were counted. `bytes_per_second`: of its memory.
    benchmarks/gpu_counts.py assumes the same.
    """

    name: str
    device: str
    memory: float
    share: float
    bytes_per_second: float

    def step_seconds(self, parameters: int, flops: int, beside: int = 0) -> float:
        """Seconds of a step in bf16 of one GPU: `flops` of its passes over all rows, and an optimizer's pass after.

        `beside`: FLOPs of networks that aren't trained, such as a text encoder.
        """
        return (flops + beside) / (self.share * self.peak) + OPTIMIZER_BYTES * parameters / self.bytes_per_second

    def mfu(self, parameters: int, flops: int, beside: int = 0) -> float:
        """Share of its peak that a step's own FLOPs are, 0 to 1."""
        return flops / (self.peak * self.step_seconds(parameters, flops, beside))

    @property
    def peak(self) -> float:
        """Dense FLOP/s in bf16."""
        peak = named_peak(self.device, "bf16")
        assert peak is not None
        return peak


CARDS = (
    Card("H100", "NVIDIA H100 80GB HBM3", 80e9, 0.395, 2.8e12),
    Card("H200", "NVIDIA H200", 141e9, 0.435, 4.0e12),
)
"""GPUs for which recipes have times."""


def bytes_a_parameter(precision: str, workers: int, use_gpu: bool) -> list[float | None]:
    """Bytes a parameter of a worker's memory (a GPU's, or a CPU's with its copy of the state), by ZeRO stage 0 to 3.

    Activations, buffers of communication and libraries come on top. None for a stage that can't be.
    """
    copy = {"bf16": 2, "fp32": 4}[precision]
    # Within the step a flat gradient, and a second one if that isn't in fp32. A CPU also holds the copy of its state.
    within = _GRADIENT + (2 if copy == 2 else 0)
    sharded = _FP32_RECORDS + within + (0 if use_gpu else _FP32_RECORDS)
    return [
        None if copy == 2 else 4 + sharded - (0 if use_gpu else _FP32_RECORDS * (1 - 1 / workers)),
        2 * copy + sharded / workers,
        copy + (copy + sharded) / workers,
        (2 * copy + sharded) / workers,
    ]
