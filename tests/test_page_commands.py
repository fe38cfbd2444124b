"""Commands of pages that need a GPU, a bucket or a hub, run on stand-ins for these.

Images are real, networks real with random weights. `ddm init` gets settings more, networks and sizes that two cores
without a network can do; what stands for a GPU, a disk or the reader's own names is replaced; ports are others.
"""

import io
import os
import re
import shlex
import socket
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import save_file

from ddm_ray.cli import main
from ddm_ray.config import recipe_text
from ddm_ray.data.images import png
from ddm_ray.jobs.attempts import claim
from ddm_ray.run.graph import PARTITION, ROUTER, ROWS, owner_rows, shard
from ddm_ray.run.run import Run
from ddm_ray.watch.gauges import GAUGES
from tests.conftest import BIN, ROOT, Island, ddm, wait_for
from tests.data.hub import hub_server
from tests.data.s3 import s3, s3_server
from tests.jobs.attempts import beat, fail, finish
from tests.page_blocks import commands_of, words_of
from tests.random_run import make_data
from tests.sampling import tiny_components
from tests.watch.hooks import hook_server

pytestmark = pytest.mark.integration

VIT = {"embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 28}
SIZES = ("data.image_size=8", "partition.num_fine=12", "expert.model.patch_size=4")
CAPTIONS = ("a red cat", "the blue dog", "a moon on the moon")


def photo(generator: np.random.Generator, shade: int) -> bytes:
    """A JPEG of some size, around a shade."""
    height, width = generator.integers(16, 48, 2)
    pixels = generator.normal(shade, 30, (height, width, 3)).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, with the machines' settings beside it, as in a clone."""
    (tmp_path / "cluster_configs").symlink_to(ROOT / "cluster_configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def dino(here: Path) -> tuple[str, ...]:
    """Settings for a DINOv2 of 16 channels with random weights."""
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, **VIT)
    save_file(model.state_dict(), here / "dino.safetensors")
    arguments = ", ".join(f"{name}: {value}" for name, value in VIT.items())
    checkpoint = f"embedder.checkpoint={here / 'dino.safetensors'}"
    return ("embedder.model=vit_small_patch14_dinov2", checkpoint, f"embedder.model_args={{{arguments}}}")


def run_block(
    page: str,
    begin: str,
    settings: tuple[str, ...],
    environment: dict[str, str] | None = None,
    instead: dict[str, str] | None = None,
    verbs: tuple[str, ...] = ("init", "prepare", "partition"),
) -> list[str]:
    """Run these verbs of the block that begins so; what each of them printed.

    With an environment in processes of their own, that and Ray's workers with it, on the Ray at RAY_ADDRESS.
    """
    printed = []
    for command in commands_of(page, begin):
        for written, replacement in (instead or {}).items():
            command = command.replace(written, replacement)
        verb, *arguments = words_of(command)
        if verb != "ddm" or arguments[0] not in verbs:
            continue
        if arguments[0] == "init":
            arguments += [part for setting in settings for part in ("--set", setting)]
        if environment is None:
            done = CliRunner().invoke(main, arguments)
            status, output = done.exit_code, done.output
        else:
            process = ddm(*arguments, where=os.getcwd(), **environment)
            status, output = process.returncode, process.stdout + process.stderr
        assert status == 0, f"{command}\n{output[-3000:]}"
        printed.append(output)
    return printed


@pytest.mark.chaos
def test_a_folder_of_class_folders(ray_cluster: str, here: Path, dino: tuple[str, ...]) -> None:
    generator = np.random.default_rng(0)
    for shade, name in zip((40, 120, 200), ("crow", "heron", "owl"), strict=True):
        (here / "photos/birds" / name).mkdir(parents=True)
        for index in range(30):
            (here / f"photos/birds/{name}/{index:02d}.jpg").write_bytes(photo(generator, shade))
    (here / "photos/birds/owl/29.jpg").write_bytes(b"no owl")
    _, prepared, parted = run_block("howto/images.md", "ddm init runs/birds", (*SIZES, *dino))
    assert "rejected" in prepared and "_rejected" in prepared
    run = Run.open("runs/birds")
    assert run.require(ROWS).info["rows"] == 89
    info = run.require(PARTITION).info
    assert (np.array(info["counts_CK"]).shape, len(info["rows_K"])) == ((3, 8), 8)
    assert f"look at it: {here}/runs/birds/partition/report/report.html\n" in parted
    assert (here / "runs/birds/partition/report/report.html").is_file()


@pytest.mark.chaos
def test_tars_and_a_run_in_a_bucket(island: Island, here: Path, dino: tuple[str, ...]) -> None:
    generator = np.random.default_rng(0)
    with s3_server(here / "s3.log"):
        s3().create_dir("lab")
        for number in range(3):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                for index in range(30):
                    for suffix, data in (("jpg", photo(generator, 60 * number + index)), ("cls", b"0")):
                        entry = tarfile.TarInfo(f"{index:04d}.{suffix}")
                        entry.size = len(data)
                        tar.addfile(entry, io.BytesIO(data))
            with s3().open_output_stream(f"lab/faces/train-{number:03d}.tar") as sink:
                sink.write(buffer.getvalue())
        aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        here_for = {" --gpu": "", " --scratch /mnt/nvme": "", "{000..127}": "{000..002}"}
        run_block("howto/buckets.md", "export AWS_ACCESS_KEY_ID", (*SIZES, *dino), island.environment(aws), here_for)
        run = Run.open("s3://lab/runs/faces")
        assert run.require(ROWS).info["rows"] == 90
        assert sum(run.require(shard(cluster)).info["rows"] for cluster in range(8)) == 90
        assert run.store.read(f"{PARTITION}/report/report.html").startswith(b"<!doctype html>")
    assert not (here / "runs").exists()


@pytest.mark.chaos
def test_captions_and_latents_from_the_hub(island: Island, here: Path, dino: tuple[str, ...]) -> None:
    generator = np.random.default_rng(0)
    images = [{"bytes": photo(generator, 3 * index), "path": None} for index in range(60)]
    table = pa.table({"image": images, "text": [CAPTIONS[index % 3] for index in range(60)]})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=25)
    tiny_components.autoencoder().save_pretrained(here / "vae")
    tiny_components.text_model().save_pretrained(here / "clip")
    tiny_components.tokenizer(here / "clip").save_pretrained(here / "clip")
    networks = (
        f"data.latents={{autoencoder: {here / 'vae'}, downsampling: 2, scale: 0.5}}",
        f"data.text={{encoder: {here / 'clip'}, tokens: 8, dim: {tiny_components.TEXT_DIM}}}",
        "data.channels=4",
        "data.heldout=0.1",
    )
    with hub_server({"lab/captions": {"data/train-00000-of-00001.parquet": buffer.getvalue()}}) as url:
        here_for = {" --gpu": "", "OWNER/NAME": "lab/captions"}
        environment = island.environment({"HF_ENDPOINT": url})
        run_block("howto/captions.md", "ddm init runs/captions", (*SIZES, *dino, *networks), environment, here_for)
    run = Run.open("runs/captions")
    assert run.require(ROWS).info["rows"] == 60
    assert run.require(PARTITION).info["counts_CK"] == []
    for cluster in range(4):
        assert "null_text.safetensors" in run.require(shard(cluster)).files


def test_owners_that_pool_nothing(ray_cluster: str, here: Path) -> None:
    for shade, name in ((60, "north"), (180, "south")):
        (here / f"images-{name}").mkdir()
        for index in range(20):
            pixels = np.random.default_rng([shade, index]).integers(0, shade, (12, 12, 3), np.uint8)
            (here / f"images-{name}/{index:02d}.png").write_bytes(png(pixels))
    agreed = ("data.class_names=null", "data.source=/images", "data.num_classes=1", "partition.method=given")
    (here / "agreed.yaml").write_text(recipe_text("tiny"))
    for begin in ("ddm init north", "ddm init south", "ddm copy north centre", "ddm partition centre"):
        run_block("howto/owners.md", begin, agreed, verbs=("init", "prepare", "partition", "copy"))
    centre = Run.open("centre")
    assert {path.suffix for path in (here / "centre").rglob("*") if path.is_file()} == {".json", ".html"}
    for cluster, name in enumerate(("north", "south")):
        owner = Run.open(name)
        assert owner.require(owner_rows(cluster)).info["rows"] == owner.require(shard(cluster)).info["rows"] == 20
        assert centre.require(PARTITION).info["rows_K"][cluster] == owner.require(shard(cluster)).info["rows_train"]
    done = CliRunner().invoke(main, ["status", "centre"])
    assert "damaged" not in done.output, done.output


@pytest.mark.chaos
def test_watching(here: Path) -> None:
    """A run whose expert trains: its status, a watch that ends with the training, a scrape, and a webhook."""
    run = make_data("runs/mine", num_rows=60)
    attempt = claim(run.store, "experts/000")
    beat(attempt, 1, 75)
    (watch,) = commands_of("howto/watch.md", "ddm watch runs/mine --prometheus")
    (curl,) = commands_of("howto/watch.md", "curl")
    with socket.socket() as probe, hook_server() as hook:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        shown = CliRunner().invoke(main, ["status", run.url])
        assert shown.exit_code == 0
        line = r"^expert 0: silent for \d+ s, step 75/300, loss 0.1235, "  # there is no heartbeat
        assert re.search(line, shown.output, re.MULTILINE)
        watch, scrape = (command.replace("9400", port) for command in (watch, curl))
        assert "http://localhost:9300/alarms" in watch and scrape != curl
        command = [str(BIN / "ddm"), *shlex.split(watch.replace("http://localhost:9300/alarms", hook.url))[1:]]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as watching:
            try:
                assert watching.stderr and watching.stderr.readline().startswith("gauges at http://127.0.0.1:")
                wait_for(lambda: "ddm_step{" in answer(scrape), 30, lambda: answer(scrape))
                expected = f'{{artifact="experts/000",run="{run.url}"}}'
                for line in (f"ddm_step{expected} 75.0", f"ddm_mfu{expected} 0.41", f"ddm_finished{expected} 0.0"):
                    assert line in answer(scrape).splitlines()
                fail(attempt, "no space left")
                wait_for(lambda: hook.events == [("experts/000", "failed")], 30)
                assert "step 75/300; `ddm train" in hook.bodies[0]["text"]
                for artifact in (*run.experts, ROUTER):
                    finish(run, artifact)
                watching.communicate(timeout=30)
                assert watching.returncode == 0
            finally:
                watching.kill()
    assert sorted(hook.events[1:]) == sorted((artifact, "finished") for artifact in (*run.experts, ROUTER))
    listed = (ROOT / "docs/reference/events.md").read_text().partition("\n## Gauges\n")[2].partition("```")[0]
    assert set(re.findall(r"^\| `(ddm_\w+)` \|", listed, re.MULTILINE)) == GAUGES.keys()


def answer(command: str) -> str:
    """What a command of a shell prints."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout
