"""Phases of gpu.py about training: what the card reaches at best, right numbers, a step, a state, an expert of 3B.

B rows, CHW image.
"""

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from gpu_measure import PEAK, TINY, XL, kernels, median_ms, sync, waits
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddm_ray.config import TrainConfig
from ddm_ray.core.flow import Flow
from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import num_parameters, training_flops_per_row
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.store import Store
from ddm_ray.train import local
from ddm_ray.train.objectives import Batch, ExpertLoss

if TYPE_CHECKING:
    from gpu import Asked


@contextmanager
def world() -> Iterator[None]:
    """A world of one for as long as the phase lasts, or the one that the process has."""
    if torch.distributed.is_initialized():
        yield
        return
    with local.world():
        yield


BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
# Width, depth and heads of DiT that come to 3.0B parameters.
LARGE = XL | {"width": 2304, "depth": 32, "heads": 18}


def roofs(asked: "Asked") -> None:
    """Products, attention, copies and launches as they are at best, with which all else is compared."""
    device, tiny = asked.device, asked.tiny

    def product(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> float:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        return 2 * m * n * k / median_ms(lambda: a @ b, device) / 1e9

    most, width, rows = (64, 32, (64,)) if tiny else (8192, 1152, (8192, 65536))
    asked.tell(f"product {most}^3, bf16", product(most, most, most), "TFLOP/s")
    asked.tell(f"product {most}^3, fp32", product(most, most, most, torch.float32), "TFLOP/s")
    for count in rows:
        for k, n in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            asked.tell(f"product {count} x {k} x {n}, forward", product(count, k, n), "TFLOP/s")
            asked.tell(f"product {k} x {count} x {n}, of weights", product(k, count, n), "TFLOP/s")
    batch, tokens = (2, 16) if tiny else (32, 256)
    for channels in (72, 64, 128):
        query = torch.randn(batch, 16, tokens, channels, device=device, dtype=torch.bfloat16, requires_grad=True)
        flops = 14 * batch * 16 * tokens * tokens * channels  # 4 forward, 10 backward
        for backend in BACKENDS:
            try:
                with sdpa_kernel(backend):
                    ms = median_ms(_attention(query), device)
            except RuntimeError:
                continue  # not on this device
            asked.tell(f"attention of {channels} channels, {backend.name}, both ways", flops / ms / 1e9, "TFLOP/s")
    _copies(asked, 2**16 if tiny else 2**30)
    one = torch.zeros(1, device=device)
    asked.tell("a launch, of a thousand", median_ms(lambda: [one.add_(1) for _ in range(1000)], device), "us")


def _attention(query: Tensor) -> Callable[[], None]:
    return lambda: F.scaled_dot_product_attention(query, query, query).sum().backward()


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


def batch_of(rows: int, size: dict[str, Any], device: str, seed: int = 1) -> tuple[Batch, Tensor]:
    """Rows of numbers drawn on the CPU, the same for all devices, and the weight that each has."""
    numbers = torch.Generator().manual_seed(seed)
    shape = (rows, size["channels"], size["image_size"], size["image_size"])
    label_B = torch.arange(rows) % size["num_classes"]
    data, noise = (torch.randn(shape, generator=numbers) for _ in range(2))
    batch = Batch(data, noise, torch.rand(rows, generator=numbers), label_B, torch.zeros_like(label_B))
    return batch.to(device), torch.full((rows,), 1 / rows, device=device)


def right(asked: "Asked") -> None:
    """Losses of a few steps by the engine, beside those of plain torch in fp32 on the CPU."""
    torch.manual_seed(0)
    model = DiT(**TINY)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    plain, expected = copy.deepcopy(model), []
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(5):
        batch, weight_B = batch_of(4, TINY, "cpu", step)
        adam.zero_grad()
        loss = (ExpertLoss(Flow())(plain, batch) * weight_B).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        expected.append(float(loss))

    def compare(name: str, precision: str, stage: int, compiled: bool, most: float) -> None:
        engine = _engine(copy.deepcopy(model), precision, zero_stage=stage, compile=compiled)
        losses = []
        for step in range(5):
            losses.append(float(engine.accumulate(ExpertLoss(Flow()), [batch_of(4, TINY, asked.device, step)])))
            engine.step(1e-3)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        asked.tell(name, apart, "relative", f"<= {most:g}")
        engine.close()

    with world():
        for precision, most in (("fp32", 1e-3), ("bf16", 3e-2)):
            for stage in (0, 1, 2, 3) if precision == "fp32" else (1, 2, 3):
                for compiled in (False, True) if stage in (1, 2) and not asked.tiny else (False,):
                    how = f"ZeRO {stage}, {precision}{', compiled' if compiled else ''}"
                    name = f"losses of the engine from a CPU's, {how}"
                    asked.tried(name, lambda n=name, p=precision, s=stage, c=compiled, m=most: compare(n, p, s, c, m))  # type: ignore[misc]


def _engine(model: nn.Module, precision: str, **placement: Any) -> Any:
    """An engine, which needs a world."""
    from ddm_ray.train.engine import Engine  # DeepSpeed, which asks for its device when it is imported

    train = TrainConfig.model_validate({"steps": 1, "global_batch": 4, "weight_decay": 0.0, "precision": precision})
    return Engine(model, train, TrainPlacement.model_validate(placement))


def step(asked: "Asked") -> None:
    """A step of DiT-XL/2 of 256 tokens through the engine, as it is and compiled, and one that is written by hand."""
    size = TINY if asked.tiny else XL
    with world():  # one for all: DeepSpeed keeps the first
        for compiled in (False,) if asked.tiny else (False, True):
            how = "compiled" if compiled else "as it is"
            asked.tried(f"engine, {how}", lambda c=compiled: _through_engine(asked, size, c))  # type: ignore[misc]
            gc.collect()
            if asked.device == "cuda":
                torch.cuda.empty_cache()
        asked.tried("by hand", lambda: _by_hand(asked, size))


def _points(asked: "Asked") -> tuple[tuple[int, int, float], ...]:
    """Rows at once, how often a step, and the MFU that is to be reached once blocks are compiled."""
    return ((4, 1, 0),) if asked.tiny else ((32, 1, 38), (64, 4, 45))


def _through_engine(asked: "Asked", size: dict[str, Any], compiled: bool) -> None:
    engine = _engine(DiT(**size), "bf16", compile=compiled)
    for rows, many, target in _points(asked):
        name = f"engine, {'compiled' if compiled else 'as it is'}, {many} x {rows} rows"
        batches = [batch_of(rows, size, asked.device, number) for number in range(many)]

        def work(batches: list[Any] = batches) -> None:
            engine.accumulate(ExpertLoss(Flow()), batches)
            engine.step(1e-4)

        began = time.perf_counter()
        work()
        sync(asked.device)
        asked.tell(f"{name}: the first step", time.perf_counter() - began, "s")
        _report(asked, name, work, many * rows, size, target if compiled else 0)
    engine.close()


def _by_hand(asked: "Asked", size: dict[str, Any]) -> None:
    """A loop with nothing of ours around it: bf16, blocks compiled, fused AdamW, EMA."""
    model = DiT(**size).to(asked.device)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    ema = [value.clone() for value in kept]
    model.to(torch.bfloat16)
    adam = torch.optim.AdamW(kept, lr=1e-4, weight_decay=0.0, fused=True)
    if not asked.tiny:
        for block in model.trunk.blocks:
            block.compile(dynamic=False)
    for rows, many, _ in _points(asked):
        batches = [batch_of(rows, size, asked.device, number) for number in range(many)]

        def work(batches: list[Any] = batches, many: int = many) -> None:
            for batch, weight_B in batches:
                ((ExpertLoss(Flow())(model, batch) * weight_B).sum() / many).backward()
            for value, parameter in zip(kept, model.parameters(), strict=True):
                assert parameter.grad is not None
                value.grad = parameter.grad.float()
            nn.utils.clip_grad_norm_(kept, 1.0, foreach=True)
            adam.step()
            with torch.no_grad():
                torch._foreach_lerp_(ema, kept, 1e-4)
                torch._foreach_copy_(list(model.parameters()), kept)
            model.zero_grad()

        _report(asked, f"by hand, blocks compiled, {many} x {rows} rows", work, many * rows, size, 0)


def _report(
    asked: "Asked", name: str, work: Callable[[], None], rows: int, size: dict[str, Any], target: float
) -> None:
    with torch.device("meta"):
        flops = rows * training_flops_per_row(DiT(**size), (size["channels"], size["image_size"], size["image_size"]))
    if asked.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = median_ms(work, asked.device, 3 if asked.tiny else 8)
    asked.tell(f"{name}: a step", ms, "ms")
    asked.tell(f"{name}: MFU", 100 * flops / (ms / 1e3) / PEAK, "%", f">= {target:g}" if target else "")
    if asked.device != "cuda":
        return
    asked.tell(f"{name}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    with waits(asked.device) as places:
        work()
    asked.tell(f"{name}: waits of a step", places.total(), "", "<= 1" if "engine" in name else "")
    asked.tell(f"{name}: where", dict(places.most_common(8)))
    asked.tell(f"{name}: kernels", kernels(work))


def state(asked: "Asked") -> None:
    """Time for which training stands still at a state, memory pinned for it, and how long writing takes beside."""
    from ddm_ray.train.snapshot import Snapshot

    size = TINY if asked.tiny else XL
    with world(), tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        model = DiT(**size)
        asked.tell("drawing a network's numbers on the CPU", time.perf_counter() - began, "s")
        engine = _engine(model, "bf16")
        owned = engine.shards.owned()
        numel = sum(values.numel() for each in owned for values in each.records.values())
        snapshot, store = Snapshot(owned), Store(folder)
        sync(asked.device)
        began = time.perf_counter()
        snapshot.take()
        asked.tell("training stands still", 1e3 * (time.perf_counter() - began), "ms", "" if asked.tiny else "<= 20")
        began = time.perf_counter()
        snapshot.write(store, "state")
        asked.tell("copying and writing a state", time.perf_counter() - began, "s")
        if asked.device == "cuda":
            pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
            asked.tell("pinned over the state", pinned / (4 * numel), "", "<= 1.05")
        engine.close()


def expert(asked: "Asked") -> None:
    """An expert of 3B parameters on one GPU: if it fits, and how long a step takes."""
    size = TINY if asked.tiny else LARGE
    with world():
        began = time.perf_counter()
        with torch.device(asked.device):  # on a CPU this alone takes half a minute
            model = DiT(**size)
        asked.tell("parameters", num_parameters(model) / 1e9, "billions")
        engine = _engine(model, "bf16", activation_checkpointing=True)
        asked.tell("making it", time.perf_counter() - began, "s")
        batches = [batch_of(8, size, asked.device)]

        def work() -> None:
            engine.accumulate(ExpertLoss(Flow()), batches)
            engine.step(1e-4)

        asked.tell("a step of 8 rows", median_ms(work, asked.device, 3, 2), "ms")
        if asked.device == "cuda":
            peak = torch.cuda.max_memory_allocated()
            asked.tell("peak memory", peak / 2**30, "GiB")
            asked.tell("peak memory, of parameters", peak / num_parameters(model), "bytes each")
        engine.close()
