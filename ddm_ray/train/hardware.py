"""Peak FLOP/s of a GPU, and the share of it that a training uses (MFU: PaLM, arXiv 2204.02311, app. B)."""

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """Dense peak of matrix products in TFLOP/s, without sparsity, as NVIDIA's data sheets and white papers say.

    bf16 and TF32 on tensor cores with fp32 accumulation, fp32 on ordinary cores; None without tensor cores.
    """

    bf16: float | None
    tf32: float | None
    fp32: float


PEAKS: dict[str, Peak] = {
    r"NVIDIA B200": Peak(2250, 1100, 80),
    r"NVIDIA H200": Peak(989.4, 494.7, 66.9),
    r"NVIDIA H200 NVL": Peak(835.5, 417.7, 60),
    r"NVIDIA H100 80GB HBM3": Peak(989.4, 494.7, 66.9),  # SXM
    r"NVIDIA H100 NVL": Peak(835.5, 417.7, 60),
    r"NVIDIA H100 PCIe": Peak(756, 378, 51.2),
    r"(NVIDIA )?A100-(SXM4|SXM|PCIE|PCIe)-\d+GB|NVIDIA A100 80GB PCIe": Peak(312, 156, 19.5),
    r"NVIDIA L40S": Peak(362.05, 183, 91.6),
    r"NVIDIA L4": Peak(121, 60, 30.3),
    r"NVIDIA A10": Peak(125, 62.5, 31.2),
    r"NVIDIA A10G": Peak(70, 35, 31.5),
    r"(NVIDIA )?GeForce RTX 4090": Peak(165.2, 82.6, 82.6),
    r"(NVIDIA )?GeForce RTX 3090": Peak(71, 35.6, 35.6),
    r"Tesla V100-SXM2-\d+GB": Peak(None, None, 15.7),
    r"Tesla V100-PCIE-\d+GB": Peak(None, None, 14),
}
"""Peaks by torch's whole name for the device: a part of one (MIG) and a laptop's variant have other peaks."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak FLOP/s of matrix products in "bf16" or "fp32" on this device; None if it isn't known, as for a CPU.

    fp32 is counted at TF32's rate if `torch.set_float32_matmul_precision` allows that.
    """
    if device.type != "cuda":
        return None
    return named_peak(torch.cuda.get_device_name(device), precision, torch.get_float32_matmul_precision())


def named_peak(name: str, precision: str, fp32_matmul: str = "highest") -> float | None:
    """Dense peak FLOP/s of a GPU by torch's name for it; `fp32_matmul`: torch's setting, "highest" without TF32."""
    peaks = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)
    if peaks is None:
        return None
    if precision == "bf16":
        peak = peaks.bf16
    else:
        peak = peaks.tf32 if fp32_matmul != "highest" and peaks.tf32 is not None else peaks.fp32
    return None if peak is None else peak * 1e12


def mfu(flops_per_row: float, rows_per_second: float, world_size: int, peak: float | None) -> float | None:
    """Share of the peak that the model's own FLOPs take, 0 to 1; None without a peak.

    `rows_per_second` counts all `world_size` devices together, each with a peak of `peak` FLOP/s.
    """
    if not peak:
        return None
    # Clocks may run faster than the data sheet says.
    return min(1.0, flops_per_row * rows_per_second / (world_size * peak))
