"""What a checkpoint costs training: the wait for the copy beside one copy of as many bytes, and slower steps after.

As a script: `train_saving.py REPEATS FOLDER WIDTH DEPTH`; prints seconds by name.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from claims import Claim, Report, median_and_spread
from data_compute import add, quotients

# Wait for a state's copy, of one flat copy of its bytes.
MOST_STALL = 1.5
MODEL = {"image_size": 16, "channels": 4, "num_classes": 10, "patch_size": 2, "heads": 6}
BATCH = 2
QUIET_STEPS = 4


def measure(repeats: int, folder: str, width: int, depth: int) -> dict[str, list[float]]:
    """Seconds of `save`, of a flat copy; of quiet steps, and of those (and how many) while a state is written."""
    import torch

    from ddm_ray.config import TrainConfig
    from ddm_ray.jobs.attempts import claim
    from ddm_ray.models.dit import DiT
    from ddm_ray.placement import TrainPlacement
    from ddm_ray.run.manifest import Identity
    from ddm_ray.store.store import Store
    from ddm_ray.train import local
    from ddm_ray.train.engine import Engine
    from ddm_ray.train.state import TrainProgress
    from ddm_ray.train.state_writer import StateWriter

    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures: dict[str, list[float]] = {name: [] for name in ("save", "copy", "quiet", "beside", "steps", "writing")}
    with local.world():
        engine = Engine(DiT(**MODEL, width=width, depth=depth), TrainConfig(steps=1, batch=BATCH), TrainPlacement())
        saver = StateWriter(claim(Store(folder), "experts/000"), Identity({}), keep=1)
        x_BCHW = torch.randn(BATCH, MODEL["channels"], MODEL["image_size"], MODEL["image_size"])
        t_B, label_B = torch.rand(BATCH), torch.arange(BATCH) % 10

        def step() -> float:
            began = time.perf_counter()
            engine.backward((engine.model(x_BCHW, t_B, label_B) - x_BCHW).square().mean())
            engine.step(1e-4)
            return time.perf_counter() - began

        step()
        numel = sum(view.numel() for one in engine.shards.owned() for view in one.records.values())
        source, target = torch.zeros(numel), torch.zeros(numel)
        for number in range(repeats + 1):
            quiet = [step() for _ in range(QUIET_STEPS)]
            copy = _seconds(lambda: target.copy_(source))
            trained = TrainProgress(number + 1, 0.0, {"loss": [0.0]})
            save = _seconds(lambda trained=trained: saver.save(engine, trained))
            began, beside = time.perf_counter(), []
            while saver.busy:
                beside.append(step())
                saver.commit_if_written(saver.writing, saver.refused)
            writing = time.perf_counter() - began
            if number:  # the first allocates what the others use again
                steps = {"quiet": sum(quiet) / len(quiet), "beside": sum(beside) / len(beside), "steps": len(beside)}
                for name, value in {"save": save, "copy": copy, "writing": writing, **steps}.items():
                    figures[name].append(value)
            else:
                figures["first"] = [save]
        saver.close(wait=True)
    return figures | {"bytes": [4.0 * numel]}


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def tell(figures: Mapping[str, Sequence[float]], report: Report) -> None:
    """The claims."""
    size = f"a state of {figures['bytes'][0] / 2**20:.0f} MiB"
    add(report, f"{size}: one flat copy", [1000 * value for value in figures["copy"]], "ms")
    stalls = quotients(figures["save"], figures["copy"])
    add(report, "stall per checkpoint", stalls, "x flat copy", MOST_STALL)
    first = figures["first"][0] / median_and_spread(figures["copy"])[0]
    report.add(Claim("stall of the first checkpoint", first, "x flat copy"))
    add(report, f"{size}: written beside training in", figures["writing"], "s")
    add(report, "a step without", [1000 * value for value in figures["quiet"]], "ms")
    add(report, "a step while a state is written", quotients(figures["beside"], figures["quiet"]), "x without")
    kept = zip(figures["beside"], figures["quiet"], figures["steps"], strict=True)
    add(report, "training lost to writing, a checkpoint", [many * (busy - quiet) for busy, quiet, many in kept], "s")


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
