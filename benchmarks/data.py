"""The data path: prepare beside a loop by hand, k-means beside its matrix products, memory, the loader.

Prepare: the stage on all cores of this machine, a private Ray started before the clock, and a loop in one process that
reads, decodes, embeds and writes the same rows; both embed with one thread a process and equal batches. Seconds times
cores are compared for each image more than a quarter of a folder: what starting costs (libraries and networks loaded,
by the stage once an actor) is in neither, but in the whole folder's time, which is told beside it. A core may be slower
while others are busy, which is in the stage's time alone: loops side by side, one a core, tell how much.
Sampling: rows of 384 dimensions in parts of 512 into the sample for k-means, of the size that it has by default.
K-means: ten iterations of the fine level with all that follows, over as many products of rows and centroids; clusters
of bounded size over unbounded ones.
Memory: the peak of the stage's processes for few and many rows of 64 x 64 pixels, parts of 512 rows, a small network,
and a sample for k-means that the few rows fill, since it is the one thing that may grow up to its size; the time that
a sample of the default size takes is measured apart.
Loader: time of a row over that of a row's training step, without draws, clipping and EMA, of the smallest expert.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import data_sides as sides
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from claims import Claim, Report, measuring
from data_compute import add, measure_kmeans, measure_loader, measure_sampling, quotients
from PIL import Image

from ddm_ray.config import load_recipe
from ddm_ray.run.run import Run

# Core seconds, of a loop's: throughput at least 0.95 of it. Peak memory, of that of few rows.
MOST_PREPARE, MOST_MEMORY = 1 / 0.95, 1.15
SIZES = {
    "images": 2048,
    "network_size": 224,
    "prepare_repeats": 3,
    "sampled": 200_000,
    "rows": 50_000,
    "fine": 1024,
    "repeats": 5,
    "few": 10_000,
    "many": 200_000,
    "loaded": 40_000,
    "steps": 200,
}
QUICK = {"images": 512, "network_size": 112, "prepare_repeats": 1, "rows": 20_000, "fine": 256, "repeats": 3}
QUICK |= {"sampled": 80_000, "few": 5_000, "many": 40_000, "loaded": 10_000}
MEASURES = ("prepare", "sampling", "kmeans", "memory", "loader")
SIDE = 320  # of the JPEGs
PART_ROWS = 64  # so that a small folder has many parts
MEMORY_PART_ROWS = 512  # likewise, so that few rows fill all that is bounded


def measure_prepare(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Core seconds of the stage over those of a loop."""
    model_args = {"img_size": args.network_size}
    checkpoint = make_checkpoint(folder / "network.safetensors", sides.MODEL, model_args)
    few, cores = args.images // 4, len(os.sched_getaffinity(0))
    for num_images in (few, args.images):
        make_images(folder / str(num_images), num_images)
    settings = (
        "data.image_size=64",
        "data.channels=3",
        f"data.class_names={json.dumps(sides.CLASSES)}",
        f"embedder={json.dumps({'kind': 'timm', 'model': sides.MODEL, 'checkpoint': str(checkpoint)})}",
        f"embedder.model_args={json.dumps(model_args)}",
        f"embedder.batch_size={sides.BATCH}",
    )
    repeats: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.prepare_repeats):
        for num_images in (few, args.images):
            images = folder / str(num_images)
            with tempfile.TemporaryDirectory(dir=folder) as out:
                source = f"data.source={images}"
                Run.create(f"{out}/run", load_recipe("tiny", (*settings, source)))
                made = sides.finish(sides.start("prepare", f"{out}/run", PART_ROWS))
                repeats.setdefault(f"prepare {num_images}", []).append(made)
                for loops in (1, cores):
                    running = [
                        sides.start("loop", images, checkpoint, json.dumps(model_args), out, f"{start}/{loops}")
                        for start in range(loops)
                    ]
                    slowest = max(map(sides.finish, running), key=lambda ended: ended["seconds"])
                    repeats.setdefault(f"{loops} {num_images}", []).append(slowest)
                    if loops == 1:
                        require_same_rows(Path(out), num_images)
            taken = {
                side: f"{side_repeats[-1]['seconds']:.1f} s"
                for side, side_repeats in repeats.items()
                if side.endswith(f" {num_images}")
            }
            report.progress(str(taken))
    tell_prepare(repeats, few, args.images, cores, report)


def tell_prepare(
    repeats: Mapping[str, Sequence[Mapping[str, float]]], few: int, many: int, cores: int, report: Report
) -> None:
    """The claims, of what all repeats of each side told: "prepare N", "1 N" (a loop) and "C N" (a loop a core)."""

    def total(side: str, what: str = "seconds", images: int = many) -> list[float]:
        return [repeat[what] for repeat in repeats[f"{side} {images}"]]

    def each(side: str, what: str = "seconds") -> list[float]:
        return [b - a for a, b in zip(total(side, what, few), total(side, what), strict=True)]

    def core_seconds(above: Sequence[float], below: Sequence[float]) -> list[float]:
        return [cores * value for value in quotients(above, below)]

    stage, loop, loops = "prepare", "1", str(cores)
    add(report, "loop: time of each image more", [1000 * value / (many - few) for value in each(loop)], "ms")
    more = "each image more"
    add(report, f"prepare, {more}: core seconds", core_seconds(each(stage), each(loop)), "x loop", MOST_PREPARE)
    add(report, f"{cores} loops side by side, {more}: core seconds", core_seconds(each(loops), each(loop)), "x loop")
    add(report, f"prepare, {more}: time", quotients(each(stage), each(loops)), f"x {cores} loops")
    add(report, f"prepare, {more}: CPU time", quotients(each(stage, "cpu"), each(loop, "cpu")), "x loop")
    add(report, f"prepare, {many} images: core seconds", core_seconds(total(stage), total(loop)), "x loop")
    add(report, "prepare: time to the first part", total(stage, "first"), "s")
    add(report, "loop: time to the first part", total(loop, "first"), "s")


def require_same_rows(out: Path, num_images: int) -> None:
    """Raises RuntimeError unless the stage and the loop wrote the same images, embedded the same."""
    columns = ["id", "data", "embedding"]
    tables = [
        pa.concat_tables([pq.read_table(path, columns=columns) for path in folder.glob("*.parquet")])
        for folder in (out / "run" / "rows", out)
    ]
    stage, loop = (table.sort_by("id") for table in tables)
    if len(loop) != num_images or stage.select(columns[:2]) != loop.select(columns[:2]):
        raise RuntimeError(f"{out}: prepare and the loop made other rows")
    stage_NX, loop_NX = (np.frombuffer(b"".join(table["embedding"].to_pylist()), "<f4") for table in (stage, loop))
    np.testing.assert_allclose(stage_NX, loop_NX, atol=1e-3)


def make_images(folder: Path, num_images: int) -> None:
    """JPEGs with as much detail as photographs have, in folders of classes."""
    for name in sides.CLASSES:
        (folder / name).mkdir(parents=True)
    for index in range(num_images):
        generator = np.random.default_rng(index)
        coarse_HWC = generator.integers(0, 256, (SIDE // 16, SIDE // 16, 3), np.uint8)
        pixels_HWC = np.asarray(Image.fromarray(coarse_HWC).resize((SIDE, SIDE * 3 // 4), Image.Resampling.BICUBIC))
        pixels_HWC = (pixels_HWC + generator.normal(0, 8, pixels_HWC.shape)).clip(0, 255).astype(np.uint8)
        path = folder / sides.CLASSES[index % len(sides.CLASSES)] / f"{index:06d}.jpg"
        Image.fromarray(pixels_HWC).save(path, quality=85)


def make_checkpoint(path: Path, model: str, model_args: Mapping[str, object]) -> Path:
    """Random weights of a network of timm."""
    import safetensors.torch
    import timm

    torch.manual_seed(0)
    safetensors.torch.save_file(timm.create_model(model, num_classes=0, **model_args).state_dict(), path)
    return path


def measure_memory(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Peak memory of both stages for few rows and for many."""
    model_args = {"img_size": 64, "embed_dim": 48, "depth": 1, "num_heads": 2}
    checkpoint = make_checkpoint(folder / "small.safetensors", sides.MODEL, model_args)
    peaks: dict[str, list[float]] = {"prepare": [], "partition": []}
    for num_rows in (args.few, args.many):
        with tempfile.TemporaryDirectory(dir=folder) as out:
            settings = (
                f"data.source=shapes:{num_rows}",
                "data.image_size=64",
                "data.channels=3",
                "data.class_names=null",
                "data.num_classes=12",
                f"embedder={json.dumps({'kind': 'timm', 'model': sides.MODEL, 'checkpoint': str(checkpoint)})}",
                f"embedder.model_args={json.dumps(model_args)}",
                f"partition.sample_rows={args.few // 2}",
            )
            Run.create(f"{out}/run", load_recipe("tiny", settings))
            for stage, more in (("prepare", (MEMORY_PART_ROWS,)), ("partition", ())):
                process = sides.start(stage, f"{out}/run", *more)
                peak = sides.Peak(process.pid)
                try:
                    took = sides.finish(process)["seconds"]
                finally:
                    peaks[stage].append(peak.stop())
                report.progress(f"{stage} of {num_rows} rows: {took:.1f} s")
                report.add(Claim(f"{stage}, {num_rows} rows: peak memory", peaks[stage][-1], "MiB"))
    for stage, (few, many) in peaks.items():
        name = f"{stage}: peak memory of {args.many} rows"
        report.add(Claim(name, many / few, f"x of {args.few}", MOST_MEMORY))


def main() -> None:
    args = measuring(__doc__ or "", MEASURES, SIZES, QUICK)
    report = Report()
    began = time.monotonic()
    for measure in args.measure:
        with tempfile.TemporaryDirectory(prefix="ddm-data-", dir=args.folder) as folder:
            match measure:
                case "prepare":
                    measure_prepare(args, Path(folder), report)
                case "sampling":
                    measure_sampling(args.sampled, args.repeats, report)
                case "kmeans":
                    measure_kmeans(args.rows, args.fine, args.repeats, report)
                case "memory":
                    measure_memory(args, Path(folder), report)
                case "loader":
                    measure_loader(args.loaded, args.steps, args.repeats, Path(folder), report)
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        report.progress(f"{time.monotonic() - began:.0f} s so far; the machine's load: {load}")
    report.finish(args.json)


if __name__ == "__main__":
    main()
