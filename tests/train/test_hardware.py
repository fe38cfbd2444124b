"""Peaks by the device's whole name, and the share of them that a training uses."""

import pytest
import torch

from ddm_ray.train.hardware import PEAKS, mfu, named_peak, peak_flops


@pytest.mark.parametrize(
    ("name", "bf16", "fp32", "tf32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12, 156e12),
        ("A100-PCIE-40GB", 312e12, 19.5e12, 156e12),
        ("NVIDIA H200", 989.4e12, 66.9e12, 494.7e12),
        ("NVIDIA GeForce RTX 3090", 71e12, 35.6e12, 35.6e12),
        ("Tesla V100-SXM2-16GB", None, 15.7e12, 15.7e12),
    ],
)
def test_known_devices(name: str, bf16: float | None, fp32: float, tf32: float) -> None:
    assert named_peak(name, "bf16") == bf16
    assert named_peak(name, "fp32") == pytest.approx(fp32)
    for allowed in ("high", "medium"):
        assert named_peak(name, "fp32", allowed) == pytest.approx(tf32)
        assert named_peak(name, "bf16", allowed) == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_what_is_not_known_is_not_guessed(name: str) -> None:
    assert named_peak(name, "bf16") is None and named_peak(name, "fp32", "high") is None


def test_slower_formats_are_slower() -> None:
    for peak in PEAKS.values():
        rates = [rate for rate in (peak.bf16, peak.tf32, peak.fp32) if rate is not None]
        assert rates == sorted(rates, reverse=True)


def test_other_devices_have_no_peak() -> None:
    assert [peak_flops(torch.device(name), "fp32") for name in ("cpu", "meta")] == [None, None]
    assert mfu(1e9, 100, 1, None) is None


def test_the_share_that_is_used() -> None:
    # 8 devices of 100 TFLOP/s each, 4e12 FLOPs a row, 80 rows a second in all: 320 of 800 TFLOP/s.
    assert mfu(4e12, 80, 8, 100e12) == pytest.approx(0.4)
    assert mfu(4e12, 80, 4, 100e12) == pytest.approx(0.8)
    assert mfu(4e12, 8000, 8, 100e12) == 1.0
    assert mfu(4e12, 0, 8, 100e12) == 0.0
