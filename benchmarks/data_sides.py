"""What data.py compares as processes of their own: the stages as a user's command runs them, and a loop by hand.

Each prints a JSON object as its last line. N images, B of a batch, H x W pixels of C channels, D of an embedding.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MIB = 2**20
MODEL = "vit_tiny_patch16_224"
CLASSES = ("a", "b", "c", "d")
IMAGE_SIZE = 64
BATCH = 64
SAMPLE_SECONDS = 0.05


def run_prepare(url: str, chunk_rows: str) -> None:
    """The stage, on a private Ray that is started before the clock is; `chunk_rows` rows a part."""
    from ddm_ray.data.prepare.stage import prepare
    from ddm_ray.placement import PreparePlacement
    from ddm_ray.ray_session import ray_session
    from ddm_ray.run.run import Run

    run = Run.open(url)
    first: list[float] = []
    with ray_session("local"):
        used, began = cpu_seconds(os.getpid()), time.perf_counter()

        def progress(fraction: float, note: str) -> None:
            if fraction > 0 and not first:
                first.append(time.perf_counter() - began)

        prepare(run, progress, PreparePlacement(), chunk_rows=int(chunk_rows))
        seconds, used = time.perf_counter() - began, cpu_seconds(os.getpid()) - used
    print(json.dumps({"seconds": seconds, "cpu": used, "first": first[0]}))


def run_partition(url: str) -> None:
    """The stage."""
    from ddm_ray.data.partition.stage import partition
    from ddm_ray.run.run import Run

    began = time.perf_counter()
    partition(Run.open(url))
    print(json.dumps({"seconds": time.perf_counter() - began}))


def run_loop(images: str, checkpoint: str, model_args: str, out: str, share: str) -> None:
    """Read, crop, embed and write the same rows in the plainest way; `share` "1/2": every second image, from the 2nd.

    The clock starts before the libraries are loaded, for the stage's workers load them after its own does.
    """
    began, used = time.perf_counter(), cpu_seconds(os.getpid())
    import timm
    import torch
    from PIL import Image, ImageOps

    torch.set_num_threads(1)
    model = timm.create_model(MODEL, num_classes=0, checkpoint_path=checkpoint, **json.loads(model_args)).eval()
    expects = timm.data.resolve_data_config({}, model=model)
    mean_C11, std_C11 = (torch.tensor(expects[name])[:, None, None] for name in ("mean", "std"))
    size = model.patch_embed.img_size
    start, step = map(int, share.split("/"))
    paths = sorted(Path(images).glob("*/*.jpg"))[start::step]
    first = 0.0
    for begin in range(0, len(paths), BATCH):
        encoded = [path.read_bytes() for path in paths[begin : begin + BATCH]]
        pixels = [
            np.asarray(ImageOps.fit(Image.open(io.BytesIO(data)).convert("RGB"), (IMAGE_SIZE, IMAGE_SIZE)))
            for data in encoded
        ]
        with torch.inference_mode():
            x_BCHW = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
            x_BCHW = torch.nn.functional.interpolate(x_BCHW, size, mode="bicubic", antialias=True).clamp(0, 1)
            embeddings_BD = model((x_BCHW - mean_C11) / std_C11).numpy()
        _write(Path(out) / f"{begin:06d}-{start}.parquet", paths[begin : begin + BATCH], encoded, pixels, embeddings_BD)
        first = first or time.perf_counter() - began
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "cpu": cpu_seconds(os.getpid()) - used, "first": first}))


def _write(path: Path, images: list[Path], encoded: list[bytes], pixels: list[Any], embeddings_BD: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "id": [f"{image.parent.name}/{image.name}" for image in images],
        "data": pa.array([image.transpose(2, 0, 1).tobytes() for image in pixels], pa.binary(3 * IMAGE_SIZE**2)),
        "label": [CLASSES.index(image.parent.name) for image in images],
        "content_hash": [hashlib.sha256(data).hexdigest() for data in encoded],
        "split": ["train"] * len(images),
        "embedding": pa.array([row.tobytes() for row in embeddings_BD], pa.binary(4 * embeddings_BD.shape[1])),
    }
    pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)


SIDES: dict[str, Callable[..., None]] = {"prepare": run_prepare, "partition": run_partition, "loop": run_loop}


def start(side: str, *arguments: object) -> "subprocess.Popen[str]":
    """A side as a fresh process with one thread for mathematics; `finish` has what it tells."""
    command = [sys.executable, __file__, side, *map(str, arguments)]
    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | settings)


def finish(process: "subprocess.Popen[str]") -> dict[str, float]:
    """The object that a side printed. Raises RuntimeError if it failed; its own words are on standard error."""
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args} failed")
    figures: dict[str, float] = json.loads(printed.splitlines()[-1])
    return figures


class Peak:
    """Most memory that a process and all below it held at once, MiB, sampled by a thread until `stop`.

    Anonymous pages of each, and Ray's object store once; not libraries' code and what files the system caches.
    """

    def __init__(self, root: int):
        self._root, self._peak = root, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        sample = 0
        while not self._over.wait(SAMPLE_SECONDS):
            if sample % 10 == 0:  # processes come and go more rarely than their memory changes
                processes = below(self._root)
                stores = [process for process in processes if _comm(process) == "raylet"]
            sample += 1
            held = sum(_anonymous(process) for process in processes) + sum(_object_store(store) for store in stores)
            self._peak = max(self._peak, held / MIB)


def below(root: int) -> list[int]:
    """A process and all that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    pids = [root]
    for process in pids:
        pids += children.get(process, [])
    return pids


def cpu_seconds(root: int) -> float:
    """Processor time of a process and all below it, with those that have ended."""
    ticks = sum(int(value) for process in below(root) for value in _stat(process)[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(process: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; none of a process that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _comm(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _anonymous(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _object_store(raylet: int) -> int:
    """Bytes of shared memory that the store's file takes by now; what it was freed of it keeps."""
    sizes: dict[int, int] = {}
    try:
        for link in Path(f"/proc/{raylet}/fd").iterdir():
            if "plasma" in os.readlink(link):
                stat = link.stat()
                sizes[stat.st_ino] = 512 * stat.st_blocks
    except (FileNotFoundError, ProcessLookupError):
        pass  # a descriptor was closed, or the process has ended
    return sum(sizes.values())


if __name__ == "__main__":
    SIDES[sys.argv[1]](*sys.argv[2:])
