"""Phases of gpu.py about training: right numbers, a step, a state, an expert of 3B parameters.

B rows, CHW image.
"""

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from gpu_measure import PEAK, TINY, XL, kernels, median_ms, sync, waits
from torch import Tensor, nn

from ddm_ray.config import TrainConfig
from ddm_ray.core.flow import Flow
from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import num_parameters, training_flops_per_row
from ddm_ray.placement import TrainPlacement
from ddm_ray.store.store import Store
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


# Width, depth and heads of DiT that come to 3.0B parameters.
LARGE = XL | {"width": 2304, "depth": 32, "heads": 18}


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
        losses = []
        with _engine(copy.deepcopy(model), precision, zero_stage=stage, compile=compiled) as engine:
            for step in range(5):
                losses.append(float(engine.accumulate(ExpertLoss(Flow()), [batch_of(4, TINY, asked.device, step)])))
                engine.step(1e-3)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        asked.tell(name, apart, "relative", f"<= {most:g}")

    with world():
        for precision, most in (("fp32", 1e-3), ("bf16", 3e-2)):
            for stage in (0, 1, 2, 3) if precision == "fp32" else (1, 2, 3):
                for compiled in (False, True) if stage in (1, 2) and not asked.tiny else (False,):
                    how = f"ZeRO {stage}, {precision}{', compiled' if compiled else ''}"
                    name = f"losses of the engine from a CPU's, {how}"
                    asked.tried(name, lambda n=name, p=precision, s=stage, c=compiled, m=most: compare(n, p, s, c, m))  # type: ignore[misc]


@contextmanager
def _engine(model: nn.Module, precision: str, **placement: Any) -> Iterator[Any]:
    """An engine in a world, closed also after an error: DeepSpeed's hooks would hold its memory."""
    from ddm_ray.train.engine import Engine

    train = TrainConfig.model_validate({"steps": 1, "batch": 4, "weight_decay": 0.0, "precision": precision})
    engine = Engine(model, train, TrainPlacement.model_validate(placement))
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _drawn(size: dict[str, Any], device: str) -> DiT:
    """A network drawn on the device: of many parameters a CPU draws for seconds."""
    with torch.device(device):
        return DiT(**size)


def step(asked: "Asked") -> None:
    """A step of DiT-XL/2 of 256 tokens through the engine, as it is and compiled, and one that is written by hand."""
    size = TINY if asked.tiny else XL
    with world():  # one for all: DeepSpeed keeps the first
        asked.tried("engine, as it is", lambda: _through_engine(asked, size, compiled=False))
        asked.tried("by hand", lambda: _by_hand(asked, size))
        if not asked.tiny:
            gc.collect()
            torch.cuda.empty_cache()
            asked.tried("engine, compiled", lambda: _through_engine(asked, size, compiled=True))


def _points(asked: "Asked") -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Rows at once, how often a step, and the MFUs that are to be reached once blocks are compiled: first, and then."""
    return ((4, 1, ()),) if asked.tiny else ((32, 1, (38, 44)), (64, 4, (45, 55)))


def _through_engine(asked: "Asked", size: dict[str, Any], compiled: bool) -> None:
    with _engine(_drawn(size, asked.device), "bf16", compile=compiled) as engine:
        for rows, many, targets in _points(asked):
            name = f"engine, {'compiled' if compiled else 'as it is'}, {many} x {rows} rows"
            batches = [batch_of(rows, size, asked.device, number) for number in range(many)]

            def work(batches: list[Any] = batches) -> None:
                engine.accumulate(ExpertLoss(Flow()), batches)
                engine.step(1e-4)

            began = time.perf_counter()
            work()
            sync(asked.device)
            asked.tell(f"{name}: the first step", time.perf_counter() - began, "s")
            _report(asked, name, work, many * rows, size, targets if compiled else ())


def _by_hand(asked: "Asked", size: dict[str, Any]) -> None:
    """A loop with nothing of ours around it: bf16, blocks compiled, fused AdamW, EMA."""
    model = _drawn(size, asked.device)
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

        _report(asked, f"by hand, blocks compiled, {many} x {rows} rows", work, many * rows, size, ())


def _report(
    asked: "Asked", name: str, work: Callable[[], None], rows: int, size: dict[str, Any], targets: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        flops = rows * training_flops_per_row(DiT(**size), (size["channels"], size["image_size"], size["image_size"]))
    if asked.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = median_ms(work, asked.device, 3 if asked.tiny else 8)
    asked.tell(f"{name}: a step", ms, "ms")
    for target in [f">= {least}" for least in targets] or [""]:
        asked.tell(f"{name}: MFU", 100 * flops / (ms / 1e3) / PEAK, "%", target)
    if asked.device != "cuda":
        return
    asked.tell(f"{name}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    with waits(asked.device) as places:
        work()
    asked.tell(f"{name}: waits of a step", places.total(), "", "<= 1" if "engine" in name else "")
    asked.tell(f"{name}: where", dict(places.most_common(8)))
    asked.tell(f"{name}: kernels", kernels(work))


def state(asked: "Asked") -> None:
    """Memory pinned for a state, how much longer steps take beside a copy of it, and how long writing takes."""
    from ddm_ray.train.snapshot import Snapshot

    size = TINY if asked.tiny else XL
    with (
        world(),
        tempfile.TemporaryDirectory() as folder,
        _engine(_drawn(size, asked.device), "bf16", compile=not asked.tiny) as engine,
    ):
        owned, batches = engine.shards.owned(), [batch_of(4 if asked.tiny else 32, size, asked.device)]
        numel = sum(values.numel() for each in owned for values in each.records.values())

        def work() -> None:
            engine.accumulate(ExpertLoss(Flow()), batches)
            engine.step(1e-4)

        began = time.perf_counter()
        snapshot = Snapshot(owned)
        asked.tell("pinning memory for it, once", time.perf_counter() - began, "s")
        if asked.device == "cuda":
            pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
            asked.tell("pinned over the state", pinned / (4 * numel), "", "<= 1.05")
        usual = median_ms(work, asked.device, 8)
        asked.tell("a step", usual, "ms")
        snapshot.take()
        writer = Thread(target=snapshot.write, args=(Store(folder), "state"))
        began = time.perf_counter()
        writer.start()
        engine.shards.being_copied = snapshot
        beside = [median_ms(work, asked.device, 1, 0) for _ in range(12)]
        # A copy of all that a state holds, by what a pinned copy to the host was seen to reach.
        copy_ms = 4 * numel / 25e9 * 1e3
        longer = sum(beside) - len(beside) * usual
        asked.tell("12 steps beside it take longer by", longer, "ms")
        asked.tell("which is of a copy at 25 GB/s", longer / copy_ms, "", "" if asked.tiny else "<= 1.5")
        writer.join()
        asked.tell("copying and writing a state", time.perf_counter() - began, "s")


def expert(asked: "Asked") -> None:
    """An expert of 3B parameters on one GPU, ZeRO 1: if it fits, and how long a step takes."""
    _expert(asked, zero_stage=1)


def sharded_expert(asked: "Asked") -> None:
    """The same by ZeRO stage 2, whose gradients lie in the optimizer's order."""
    _expert(asked, zero_stage=2)


def _expert(asked: "Asked", zero_stage: int) -> None:
    size = TINY if asked.tiny else LARGE
    with world():
        began = time.perf_counter()
        model = _drawn(size, asked.device)
        count = num_parameters(model)
        asked.tell("parameters", count / 1e9, "billions")
        how = {"activation_checkpointing": True, "zero_stage": zero_stage, "compile": not asked.tiny}
        with _engine(model, "bf16", **how) as engine:
            asked.tell("making it", time.perf_counter() - began, "s")
            batches = [batch_of(8, size, asked.device)]

            def work() -> None:
                engine.accumulate(ExpertLoss(Flow()), batches)
                engine.step(1e-4)

            if asked.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                asked.tell("a step of 8 rows", median_ms(work, asked.device, 3, 2), "ms")
            finally:
                if asked.device == "cuda":
                    peak = torch.cuda.max_memory_allocated()
                    asked.tell("peak memory", peak / 2**30, "GiB")
                    asked.tell("peak memory, of parameters", peak / count, "bytes each")
