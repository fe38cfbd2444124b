"""Phase of gpu.py: what the card reaches at best, which needs torch alone."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from gpu_measure import each_ms, median_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from gpu import Asked

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def roofs(asked: "Asked") -> None:
    """Products, attention, copies and launches as they are at best, with which all else is compared."""
    device, tiny = asked.device, asked.tiny

    def product(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16, transposed: bool = False) -> float:
        a = torch.randn(*((k, m) if transposed else (m, k)), device=device, dtype=dtype)
        b = torch.randn(k, n, device=device, dtype=dtype)
        return 2 * m * n * k / each_ms(lambda: (a.t() if transposed else a) @ b, device) / 1e9

    most, width, rows = (64, 32, (64,)) if tiny else (8192, 1152, (8192, 65536))
    asked.tell(f"product {most}^3, bf16", product(most, most, most), "TFLOP/s")
    asked.tell(f"product {most}^3, fp32", product(most, most, most, torch.float32), "TFLOP/s")
    for count in rows:
        for k, n in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            asked.tell(f"product {count} x {k} x {n}, forward", product(count, k, n), "TFLOP/s")
            asked.tell(f"product {k} x {count} x {n}, of weights", product(k, count, n, transposed=True), "TFLOP/s")
    batch, tokens = (2, 16) if tiny else (32, 256)
    for channels in (72, 64, 128):
        flops = 14 * batch * 16 * tokens * tokens * channels  # 4 forward, 10 backward
        for backend in BACKENDS:
            name = f"attention of {channels} channels, {backend.name}, both ways"
            try:
                with sdpa_kernel(backend):
                    ms = each_ms(_attention(batch, tokens, channels, device), device)
            except RuntimeError as error:
                asked.tell(name, str(error).partition("\n")[0])
                continue
            asked.tell(name, flops / ms / 1e9, "TFLOP/s")
    _copies(asked, 2**16 if tiny else 2**30)
    one = torch.zeros(1, device=device)
    asked.tell("a launch, of a thousand", median_ms(lambda: [one.add_(1) for _ in range(1000)], device), "us")


def _attention(batch: int, tokens: int, channels: int, device: str) -> Callable[[], object]:
    query, key, value = (
        torch.randn(batch, 16, tokens, channels, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn_like(query)
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(query, key, value), (query, key, value), gradient)


def _copies(asked: "Asked", size: int) -> None:
    device = asked.device
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    speed = 2 * size / median_ms(lambda: target.copy_(source), device) / 1e9
    asked.tell("copy on the device, read and written", speed, "TB/s")
    host, part = torch.empty(size // 4, dtype=torch.uint8), source[: size // 4]
    asked.tell("from the host, pageable", size / 4 / median_ms(lambda: part.copy_(host), device) / 1e6, "GB/s")
    if device == "cuda":
        pinned = host.pin_memory()
        up = median_ms(lambda: part.copy_(pinned, non_blocking=True), device)
        down = median_ms(lambda: pinned.copy_(part, non_blocking=True), device)
        asked.tell("from the host, pinned", size / 4 / up / 1e6, "GB/s")
        asked.tell("to the host, pinned", size / 4 / down / 1e6, "GB/s")
