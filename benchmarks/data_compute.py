"""What data.py measures in its own process: the sample for k-means, k-means, the loader beside training steps.

N rows, D dimensions, F fine centroids, K clusters; B rows of a batch.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from claims import Claim, Report, interleaved, median_and_spread
from threadpoolctl import threadpool_info

from ddm_ray.config import load_recipe
from ddm_ray.config.data import PartitionConfig
from ddm_ray.core.kmeans import BLOCK, two_level_kmeans
from ddm_ray.data.loading.loader import Loader
from ddm_ray.data.partition.file_plan import FilePlan
from ddm_ray.data.partition.made_files import MadeFiles
from ddm_ray.data.partition.sample import RowSample
from ddm_ray.data.partition.shards import WrittenShard, commit_shard
from ddm_ray.data.partition.state import ExpectedShard
from ddm_ray.data.partition.tally import Tally
from ddm_ray.data.schema import column, data_dtype, shard_file_schema
from ddm_ray.run.graph import expert, shard
from ddm_ray.run.run import Run
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.job import train_job

# Times of a sampled row, of that of a quarter as many; of matrix products; of unbounded k-means; of a row of a step.
MOST_SAMPLING, MOST_KMEANS, MOST_BALANCED, MOST_LOADER = 1.5, 2.0, 2.0, 0.1
ITERATIONS, DIM, CLUSTERS, PART_ROWS = 10, 384, 8, 512
RECIPES = ("tiny", "digits")
LATENTS = ("data.image_size=32", "data.channels=4", "data.latents={autoencoder: none, scale: 1.0}")


def measure_sampling(num_rows: int, repeats: int, report: Report) -> None:
    """Time of a row in the sample of the default size: of all rows, and of a quarter of them."""
    generator = np.random.default_rng(0)
    features_ND = generator.standard_normal((PART_ROWS, DIM), np.float32)
    key_N = generator.integers(0, 2**64, num_rows, np.uint64, endpoint=False)
    size = PartitionConfig.model_fields["sample_rows"].default

    def sample(count: int) -> None:
        rows = RowSample(min(size, count))
        for begin in range(0, count, PART_ROWS):
            part = key_N[begin : min(begin + PART_ROWS, count)]
            rows.add(part, features_ND[: len(part)])
        rows.arrays()

    counts = (num_rows // 4, num_rows)
    sides: dict[str, Callable[[], object]] = {str(count): partial(sample, count) for count in counts}
    seconds = interleaved(sides, repeats, "cpu")
    few, many = ([1e6 * value / count for value in seconds[str(count)]] for count in counts)
    add(report, f"{num_rows} rows of {DIM} to a sample of {size} at most: time a row", many, "us")
    add(report, "sampling: time a row", quotients(many, few), f"x of {counts[0]} rows", MOST_SAMPLING)


def measure_kmeans(num_rows: int, num_fine: int, repeats: int, report: Report) -> None:
    """Fine and coarse k-means over the matrix products of the fine one, and balanced over plain."""
    generator = np.random.default_rng(0)
    rows_ND = generator.standard_normal((num_rows, DIM), np.float32)
    # Groups, as embeddings have; more than there are centroids, so that no iteration is the last before its time.
    rows_ND += generator.standard_normal((4 * num_fine, DIM), np.float32)[np.arange(num_rows) % (4 * num_fine)]
    centroids_FD = rows_ND[:num_fine]

    def products() -> None:
        for _ in range(ITERATIONS):
            for begin in range(0, num_rows, BLOCK):
                rows_ND[begin : begin + BLOCK] @ centroids_FD.T

    fit = partial(two_level_kmeans, rows_ND, num_fine, CLUSTERS, ITERATIONS, 0)
    sides: dict[str, Callable[[], object]] = {
        "products": products,
        "plain": fit,
        "balanced": partial(fit, max_share=1.05 / CLUSTERS),
    }
    seconds = interleaved(sides, repeats, "cpu")
    threads = max(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas")
    size = f"{num_rows} rows of {DIM}, {num_fine} centroids, {threads} threads"
    add(report, f"matrix products, {size}", seconds["products"], "s")
    add(report, "k-means: time", quotients(seconds["plain"], seconds["products"]), "x its products", MOST_KMEANS)
    balanced = quotients(seconds["balanced"], seconds["plain"])
    add(report, "k-means, balanced: time", balanced, "x plain", MOST_BALANCED)


def measure_loader(num_rows: int, steps: int, repeats: int, folder: Path, report: Report) -> None:
    """Time of a row over that of a row in the fastest training step of a shipped recipe; of its own, for latents."""
    torch.set_num_threads(1)
    runs = {name: Run.create(str(folder / name), load_recipe(name)) for name in RECIPES}
    runs["latents"] = Run.create(str(folder / "latents"), load_recipe("tiny", LATENTS))
    for run in runs.values():
        make_shard(run, num_rows)
    with ExitStack() as stack:
        sides: dict[str, Steps | Epoch] = {f"step of {name}": Steps(run, steps, stack) for name, run in runs.items()}
        for kind, name in (("8x8 pixels", "tiny"), ("4x32x32 latents", "latents")):
            for where, rows_gib in (("in memory", None), ("streamed", 0.0)):
                sides[f"{kind}, {where}"] = Epoch(runs[name], rows_gib, stack)
        taken = interleaved(sides, repeats, "cpu")
    seconds = {name: [value / side.rows for value in taken[name]] for name, side in sides.items()}
    fastest = min((f"step of {name}" for name in RECIPES), key=lambda name: median_and_spread(seconds[name])[0])
    for name, values in seconds.items():
        add(report, f"{name}: time of a row", [1e6 * value for value in values], "us")
        if isinstance(sides[name], Epoch):
            add(report, f"{name}: time of a row, to a step", quotients(values, seconds[fastest]), fastest, MOST_LOADER)
        if name.startswith("4x32x32"):
            add(report, f"{name}: time of a row, to its own step", quotients(values, seconds["step of latents"]), "x")


class Epoch:
    """Calls take an epoch's batches from a loader, one epoch after the other."""

    def __init__(self, run: Run, rows_gib: float | None, stack: ExitStack):
        batch = train_job(run, expert(0)).batch
        self._loader = stack.enter_context(loader_of(run, rows_gib))
        assert self._loader.in_memory is (rows_gib is None)
        self._place_B, self._step = torch.arange(batch), 0
        self._steps = self._loader.num_rows // batch
        self.rows = self._steps * batch

    def __call__(self) -> None:
        for _ in range(self._steps):
            self._loader.batch(self._step, self._place_B)
            self._step += 1


class Steps:
    """Calls take forward, backward and AdamW's fastest form on one batch that is already there, many times."""

    def __init__(self, run: Run, steps: int, stack: ExitStack):
        self._job, self._steps = train_job(run, expert(0)), steps
        batches = RankBatches(self._job, stack.enter_context(loader_of(run, None)), 0, 1, self._job.batch)
        self._batch, self._weight_B = next(batches.at(0, torch.device("cpu")))
        self._model = self._job.build()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self.rows = steps * self._job.batch

    def __call__(self) -> None:
        for _ in range(self._steps):
            self._optimizer.zero_grad()
            (self._job.objective(self._model, self._batch) * self._weight_B).sum().backward()
            self._optimizer.step()


def loader_of(run: Run, rows_gib: float | None) -> Loader:
    job = train_job(run, expert(0))
    return Loader(run, job.shards, job.train.seed, job.batch, rows_gib)


def make_shard(run: Run, num_rows: int, cluster: int = 0) -> None:
    """Rows of noise as a cluster's shard, by the writer that the partition has."""
    config, block = run.config.data, 10_000
    rows_2K = np.zeros((2, run.config.partition.num_clusters), np.int64)
    rows_2K[0, cluster] = num_rows
    generator = np.random.default_rng(cluster)
    tables = []
    for begin in range(0, num_rows, block):
        count = min(block, num_rows - begin)
        values = generator.integers(0, 255, (count, *config.shape)).astype(data_dtype(config))
        columns = {
            "id": [f"row/{index:08d}" for index in range(begin, begin + count)],
            "data": column(values, data_dtype(config)),
            "label": generator.integers(0, len(config.class_names), count),
        }
        tables.append(pa.table(columns, schema=shard_file_schema(config)))
    expected = {cluster: ExpectedShard(run, cluster, None, run.identity(shard(cluster)))}
    plan, files = FilePlan(config, rows_2K[0], rows_2K[1], [cluster], 2**40), MadeFiles(run, expected, 2**40)
    made = files.write(plan.files[0], pa.concat_tables(tables))
    assert made
    written = WrittenShard(Tally.none(config))
    written.add(made)
    commit_shard(expected[cluster], written, num_rows, 0)
    files.clear()
    assert run.require(shard(cluster)).info["rows"] == num_rows


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def add(report: Report, name: str, values: Sequence[float], unit: str, target: float | None = None) -> None:
    median, spread = median_and_spread(values)
    report.add(Claim(name, median, unit, target, spread))
