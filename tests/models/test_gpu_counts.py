"""What a step of DiT-XL/2 asks of a GPU stays what it is: kernels and bytes, counted on meta tensors."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from ddm_ray.models.dit import DiT

pytestmark = pytest.mark.contract


def test_kernels_and_bytes_of_a_step(benchmark: Callable[[str], ModuleType]) -> None:
    """Each row costs in proportion: nothing is done row by row."""
    counts = benchmark("gpu_counts")
    with torch.device("meta"):
        model = DiT(**counts.XL_2).bfloat16()
    few, many = (
        counts.counted_pass(model, rows, (4, 32, 32), torch.empty(rows, dtype=torch.int64, device="meta"))
        for rows in (32, 64)
    )
    assert many.total.kernels <= few.total.kernels <= 1740
    assert few.total.bytes <= 87e9 and many.total.bytes < 2 * few.total.bytes
    assert few.total.flops / 32 == many.total.flops / 64
    assert few.waits == 0
    products = few.kinds[counts.PRODUCTS].bytes
    assert few.kinds[counts.REST].bytes < 1.75 * products, "what compiling is for"
