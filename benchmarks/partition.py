"""Partition on several nodes beside one process: throughput, what a node holds, a node's death, memory by rows.

Rows of 384 dimensions and 8 KB of latents, in parts of 512. Nodes are those of a cluster on this machine, each with its
share of the cores, an object store of its own and a folder that it spills to; a head without cores has the driver.
Disk: the most that a node's folder held at once, over the bytes of all rows. Memory: the most that the driver held and
that another process held, and these of many rows over those of fewer. A node is killed once half of the groups of files
are written, and none comes in its place.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from claims import Claim, Report, measuring
from data_sides import MIB, below

from ddm_ray.config import load_recipe
from ddm_ray.data.order import holdout_fractions
from ddm_ray.data.prepare.finalize import commit
from ddm_ray.data.prepare.make_rows import NETWORKS
from ddm_ray.data.prepare.records import EmbeddedRows, SourcePlan, rows_store, store_rows
from ddm_ray.data.schema import EMBEDDING, HELDOUT, TRAIN, column, rows_schema
from ddm_ray.data.sources import Unit
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.run.graph import PARTITION, ROWS
from ddm_ray.run.run import Run

SIZES = {"rows": 1_000_000, "fewer": 200_000, "nodes": 3, "store_mib": 1024, "sample_rows": 1_000_000}
QUICK = {"rows": 20_000, "fewer": 10_000, "nodes": 3, "store_mib": 128, "sample_rows": 1_000_000}
MEASURES = ("nodes", "killed", "memory")
LATENTS = ("data.image_size=32", "data.channels=4", "data.latents={autoencoder: none, scale: 1.0}")
SETTINGS = (*LATENTS, "partition.num_clusters=8", "partition.num_fine=1024", "expert.train.batch=8")
DIM, PART_ROWS = 384, 512
# Of all rows' bytes; of the time without a death; rows a second, of those of one process; peak memory.
MOST_DISK, MOST_TIME, MOST_SLOWER, MOST_MEMORY = 0.6, 1.25, 1 / 0.8, 1.15
SAMPLE_SECONDS = 0.2
PHASES = ("sampling", "k-means", "clusters", "sorting", "shard")


def make_rows(folder: Path, num_rows: int, sample_rows: int) -> Run:
    """A run of rows in groups, as `prepare` leaves them."""
    run = Run.create(str(folder), load_recipe("tiny", (*SETTINGS, f"partition.sample_rows={sample_rows}")))
    chunks, generator = rows_store(run, ROWS), np.random.default_rng(0)
    plan = chunks.plan(lambda: SourcePlan("noise", PART_ROWS, None, (Unit("all", 1),)))
    centre_GD = 2 * generator.standard_normal((64, DIM), np.float32)
    records, starts = [], range(0, num_rows, PART_ROWS)
    for number, start in enumerate(starts):
        ids = [f"row/{index:09d}" for index in range(start, min(start + PART_ROWS, num_rows))]
        count, held_N = len(ids), holdout_fractions(ids) < run.config.data.heldout
        values = {
            "id": ids,
            "data": column(generator.standard_normal((count, 4, 32, 32), np.float32), np.dtype("<f2")),
            "label": generator.integers(0, 10, count),
            "content_hash": [hashlib.sha256(row_id.encode()).hexdigest() for row_id in ids],
            "split": [HELDOUT if held else TRAIN for held in held_N],
            "embedding": column(
                centre_GD[generator.integers(0, 64, count)] + generator.standard_normal((count, DIM), np.float32),
                EMBEDDING,
            ),
            "thumbnail": [b"jpeg"] * count,
        }
        table = pa.table(values, schema=rows_schema(run.config.data, DIM))
        key = ChunkKey(0, number, number == len(starts) - 1)
        records.append(store_rows(chunks, key, EmbeddedRows(table, [])))
    chunks.write_once(NETWORKS, ".json", lambda: (b"{}", {}))
    commit(chunks, plan, records)
    return run


def copy_of(run: Run, folder: Path) -> Run:
    """The same run without its partition, its files by links."""
    shutil.copytree(run.url, folder, copy_function=os.link, ignore=shutil.ignore_patterns(PARTITION))
    return Run.open(str(folder))


def digest_of(run: Run) -> str:
    """A hash over all files of a partition."""
    digest = hashlib.sha256()
    for key in run.store.sizes(PARTITION):
        digest.update(f"{key} {hashlib.sha256(run.store.read(f'{PARTITION}/{key}')).hexdigest()}\n".encode())
    return digest.hexdigest()


class Phases:
    """An `OnProgress` that notes when each phase of a partition begins, by what its notes begin with."""

    def __init__(self) -> None:
        self._began = [(PHASES[0], time.perf_counter())]

    def __call__(self, fraction: float, note: str) -> None:
        for name in PHASES:
            if name != self._began[-1][0] and any(part.startswith(name) for part in note.split(": ")):
                self._began.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Of each phase, and of all."""
        ends = [at for _, at in self._began[1:]] + [time.perf_counter()]
        seconds = {name: end - at for (name, at), end in zip(self._began, ends, strict=True)}
        return {**seconds, "seconds": ends[-1] - self._began[0][1]}


def run_serial(url: str) -> None:
    """One process with all cores."""
    from ddm_ray.data.partition.stage import partition

    phases = Phases()
    partition(Run.open(url), phases, with_report=False)
    print(json.dumps(phases.seconds()))


def run_nodes(url: str, spill: str, nodes: str, store_mib: str, deadly: str) -> None:
    """Ray Data on a cluster of this machine; with `deadly` "yes" a node dies half-way."""
    import ray
    from ray.cluster_utils import Cluster

    from ddm_ray.data.partition.ray_data import RayPasses
    from ddm_ray.data.partition.stage import partition

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 128 * MIB})
    ray.init(address=cluster.address, log_to_driver=False)
    cores = max(1, len(os.sched_getaffinity(0)) // int(nodes))
    members = [
        cluster.add_node(
            num_cpus=cores, object_store_memory=int(store_mib) * MIB, object_spilling_directory=f"{spill}/{number}"
        )
        for number in range(int(nodes))
    ]
    killed: list[str] = []
    phases = Phases()

    def tell(fraction: float, note: str) -> None:
        phases(fraction, note)
        written = re.fullmatch(r"sorting: (\d+) of (\d+) groups of files", note.replace(",", ""))
        if deadly == "yes" and written and not killed and 2 * int(written[1]) >= int(written[2]):
            os.kill(members[0].all_processes["raylet"][0].process.pid, signal.SIGKILL)
            killed.append(note)

    partition(Run.open(url), tell, with_report=False, execute=RayPasses())
    print(json.dumps({**phases.seconds(), "killed": len(killed)}))
    ray.shutdown()
    cluster.shutdown()


class Watch:
    """Most bytes in each folder, and most memory of a driver and of one process below it, MiB, sampled by a thread."""

    def __init__(self, root: int, folders: list[Path]):
        self.disk, self.driver, self.worker = dict.fromkeys(folders, 0), 0.0, 0.0
        self._root, self._over = root, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for folder, most in self.disk.items():
                self.disk[folder] = max(most, sum(_sizes(folder)))
            self.driver = max(self.driver, _anonymous(self._root) / MIB)
            others = [pid for pid in below(self._root) if pid != self._root]
            self.worker = max(self.worker, *(_anonymous(pid) / MIB for pid in others), 0.0)


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            yield path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def measured(side: str, run: Run, *arguments: object, folders: list[Path]) -> tuple[dict[str, float], Watch]:
    """What a side printed, as a process of its own with one thread a worker for mathematics, and what it held."""
    settings = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": hashlib.sha256(os.urandom(32)).hexdigest()}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, __file__, side, run.url, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | settings)
    watch = Watch(process.pid, folders)
    printed, _ = process.communicate()
    watch.stop()
    if process.returncode:
        raise RuntimeError(f"{command} failed")
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{"))), watch


def measure(args: argparse.Namespace, folder: Path, report: Report) -> None:
    run = make_rows(folder / "rows", args.rows, args.sample_rows)
    all_bytes = sum(record.bytes for record in run.require(ROWS).files.values())
    spills = [folder / "spill" / str(number) for number in range(args.nodes)]
    size = f"{args.rows} rows of {all_bytes / args.rows:.0f} bytes"
    nodes = (folder / "spill", args.nodes, args.store_mib)
    serial_run, nodes_run = (copy_of(run, folder / name) for name in ("serial", "nodes"))
    serial, _ = measured("serial", serial_run, folders=[])
    report.add(Claim(f"one process, {size}", serial["seconds"], "s"))
    together, watch = measured("nodes", nodes_run, *nodes, "no", folders=spills)
    if digest_of(serial_run) != digest_of(nodes_run):
        raise RuntimeError("one process and several nodes made other files")
    report.add(Claim(f"{args.nodes} nodes: time", together["seconds"] / serial["seconds"], "x one", MOST_SLOWER))
    for name in PHASES:
        report.add(Claim(f"{name}: one process", serial[name], "s"))
        report.add(Claim(f"{name}: {args.nodes} nodes", together[name], "s"))
    report.add(Claim("disk of a node", max(watch.disk.values()) / all_bytes, "of all bytes", MOST_DISK))
    report.add(Claim("the driver, which has the sample: peak memory", watch.driver, "MiB"))
    report.add(Claim("another process: peak memory", watch.worker, "MiB"))
    if "killed" in args.measure:
        killed_run = copy_of(run, folder / "killed")
        killed, _ = measured("nodes", killed_run, *nodes, "yes", folders=spills)
        if digest_of(serial_run) != digest_of(killed_run) or not killed["killed"]:
            raise RuntimeError("no node was killed, or its death changed files")
        report.add(Claim("a node killed: time", killed["seconds"] / together["seconds"], "x undisturbed", MOST_TIME))
    if "memory" in args.measure:
        fewer_run = make_rows(folder / "fewer", args.fewer, args.sample_rows)
        _, fewer = measured("nodes", fewer_run, *nodes, "no", folders=spills)
        for name, many, few in (("the driver", watch.driver, fewer.driver), ("another", watch.worker, fewer.worker)):
            claim = f"{name}: peak memory of {args.rows} rows"
            report.add(Claim(claim, many / few, f"x of {args.fewer}", MOST_MEMORY))


def main() -> None:
    args = measuring(__doc__ or "", MEASURES, SIZES, QUICK)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="ddm-partition-", dir=args.folder) as folder:
        measure(args, Path(folder), report)
    report.finish(args.json)


SIDES = {"serial": run_serial, "nodes": run_nodes}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SIDES:
        SIDES[sys.argv[1]](*sys.argv[2:])
    else:
        main()
