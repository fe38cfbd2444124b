"""Runs to be damaged: rows made in this process, which can be gone on with from any state."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import T5Config, T5EncoderModel

from ddm_ray.config import load_recipe
from ddm_ray.data.images import png
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run
from tests.data.broken import BROKEN, picture
from tests.data.damage import images, write_folder, write_tar
from tests.models.test_text import tokenizer

CHUNK = 16


def make_images(folder: Path, version: int, *settings: str) -> Run:
    """A run of a folder of images of which three are broken and two are equal; another version has one that differs."""
    write_folder(folder / "images")
    (folder / "images/apples/version.png").write_bytes(png(np.full((9, 9), version, np.uint8)))
    (folder / "images/boats/twin.png").write_bytes(images()["0001-plain.png"])
    for kind in ("empty", "text", "cut png"):
        (folder / f"images/doors/{kind}.png").write_bytes(BROKEN[kind](picture(np.random.default_rng(1))))
    pictures = ("data.class_names=[]", "data.num_classes=4", "data.channels=3", "embedder.dim=4")
    pictures += (f"data.source={folder / 'images'}", "data.duplicates=drop")
    run = Run.create(str(folder / "run"), load_recipe("tiny", (*pictures, *settings)))
    resume(run)
    return run


def make_texts(folder: Path, version: int) -> Run:
    """A run of captioned images in a tar; another version has one caption that differs."""
    t5, source = folder / "t5", folder / "captions.tar"
    if not t5.exists():
        torch.manual_seed(0)
        sizes = T5Config(vocab_size=12, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        T5EncoderModel(sizes).save_pretrained(t5)
        tokenizer(begins=False).save_pretrained(t5)
    pictures = list(images().values())
    captions = ["a red cat" if row % 3 else "a dog" for row in range(60)]
    captions[7] = ("a cat", "a red dog")[version]
    write_tar(source, [(f"{row:04d}", {"png": pictures[row], "txt": captions[row].encode()}) for row in range(60)])
    data = {"source": str(source), "channels": 3, "text": {"encoder": str(t5), "tokens": 6, "dim": 8}}
    run = Run.create(str(folder / "run"), load_recipe("tiny", (f"data={json.dumps(data)}", "embedder.dim=4")))
    resume(run)
    return run


def resume(run: Run) -> Manifest:
    """Prepare the run's rows in this process."""
    return prepare(run, chunk_rows=CHUNK, execute=serial)
