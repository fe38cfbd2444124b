import io
import json
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from ddm_ray.config import DataConfig, load_recipe
from ddm_ray.data.partition import partition
from ddm_ray.data.prepare import DECODER_ERRORS, decode, place, prepare, prepare_source
from ddm_ray.data.schema import SOURCE, images, matrix, read_artifact, rows_schema
from ddm_ray.data.sources import digits, from_table, png
from ddm_ray.errors import DataError
from ddm_ray.storage.run import ROWS, Run
from tests.data.rows import commit_rows

NUM_DIGITS = 1797
GREY = DataConfig(class_names=("a", "b"))
DIGIT_PNG = png(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4)

KILLED = """
import os, signal, sys, ray
from ddm_ray.data.prepare import prepare
from ddm_ray.storage.run import Run
ray.init(address=sys.argv[1], log_to_driver=False)
def die(fraction, note):
    if note == "checking":
        os.kill(os.getpid(), signal.SIGKILL)
prepare(Run.open(sys.argv[2]), die)
"""


@pytest.fixture
def tiny(tmp_path):
    return Run.create(str(tmp_path / "run"), load_recipe("tiny"))


def some(*rows: tuple[str, bytes | None, int]) -> pa.Table:
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=SOURCE)


def drawn(count: int, size: int = 8) -> pa.Table:
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size), dtype=np.uint8)
    return some(*((f"drawn/{index:03d}", png(image), index % 10) for index, image in enumerate(pixels)))


def test_digits_become_rows_once(ray_cluster, tiny):
    notes = []
    manifest = prepare(tiny, lambda fraction, note: notes.append((fraction, note)))
    rows = read_artifact(tiny, ROWS)
    assert rows["id"].to_pylist() == [f"digits/{index:04d}" for index in range(NUM_DIGITS)]
    assert rows.schema.equals(rows_schema((1, 8, 8), 8))
    pixels, labels = load_digits(return_X_y=True)
    assert np.abs((images(rows, (1, 8, 8)).reshape(-1, 64) + 1) * 8 - pixels).max() < 0.04
    assert (rows["label"].to_numpy() == labels).all()
    heldout = rows["split"].to_pylist().count("heldout")
    assert 0.07 < heldout / NUM_DIGITS < 0.13
    expected = {
        "rows": NUM_DIGITS,
        "rows_heldout": heldout,
        "rejected": 0,
        "duplicates": 0,
        "embedding_dim": 8,
    }
    assert manifest.info == expected
    assert [fraction for fraction, _ in notes] == sorted(fraction for fraction, _ in notes)
    assert notes[-1] == (1.0, "1797 rows, 0 rejected")

    files = {key: tiny.store.read(f"{ROWS}/{key}") for key in tiny.store.sizes(ROWS)}
    assert prepare(tiny, lambda *_: pytest.fail("a finished stage does nothing")) == manifest
    assert {key: tiny.store.read(f"{ROWS}/{key}") for key in tiny.store.sizes(ROWS)} == files


def test_block_order_does_not_reach_the_shards(ray_cluster, tmp_path, tiny):
    shuffled = digits().take(np.random.default_rng(0).permutation(NUM_DIGITS))
    prepare_source(tiny, from_table(shuffled))
    plain = commit_rows(str(tmp_path / "plain"))
    for run in (tiny, plain):
        partition(run)
    for key in ("centroids.safetensors", *(f"shards/cluster=00{k}/part-0.parquet" for k in (0, 1))):
        assert tiny.store.read(f"partition/{key}") == plain.store.read(f"partition/{key}"), key


def test_a_killed_attempt_leaves_no_rows(ray_cluster, tiny):
    killed = subprocess.run([sys.executable, "-c", KILLED, ray_cluster, tiny.url], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = set(tiny.store.sizes(ROWS))
    assert left
    assert tiny.finished(ROWS) is None

    def straggle(fraction: float, note: str) -> None:
        if note == "checking":
            tiny.store.write(f"{ROWS}/part-straggler.parquet", b"of the killed attempt")

    manifest = prepare(tiny, straggle)
    assert not left & set(tiny.store.sizes(ROWS))
    assert "part-straggler.parquet" not in manifest.files
    ids = read_artifact(tiny, ROWS)["id"].to_pylist()
    assert len(ids) == len(set(ids)) == NUM_DIGITS


def test_bad_rows_are_rejected_with_reasons_and_equal_ones_counted(ray_cluster, tiny):
    bad = some(
        ("bad/text", b"no image at all", 1),
        ("bad/cut", DIGIT_PNG[:-30], 1),
        ("bad/none", None, 1),
        ("bad/label", DIGIT_PNG, 10),
        ("good/twin", drawn(1)["image"][0].as_py(), 1),
    )
    manifest = prepare_source(tiny, from_table(pa.concat_tables([bad, drawn(60)])))
    assert manifest.info["rows"] == 61
    assert manifest.info["rejected"] == 4
    assert manifest.info["duplicates"] == 1
    assert not set(read_artifact(tiny, ROWS)["id"].to_pylist()) & {
        "bad/text",
        "bad/cut",
        "bad/none",
        "bad/label",
    }
    rejected = tiny.store.sizes(f"{ROWS}/_rejected")
    found = [entry for name in rejected for entry in json.loads(tiny.store.read(f"{ROWS}/_rejected/{name}"))]
    reasons = {entry["id"]: entry["reason"] for entry in found}
    assert reasons["bad/text"] == "UnidentifiedImageError: not an image of a known format"
    assert reasons["bad/none"] == "ValueError: no image"
    assert reasons["bad/label"] == "ValueError: label 10 is not in 0..9"
    assert "truncated" in reasons["bad/cut"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (SOURCE.empty_table(), "gave no row to train on; data.heldout is 0.1"),
        (
            some(("a", b"x", 0), ("b", None, 0)),
            "gave no row to train on: 2 were rejected, e.g. a (UnidentifiedImageError: not an image of a"
            " known format); see rows/_rejected",
        ),
        (pa.concat_tables([drawn(60), drawn(3)]), "3 ids come twice, e.g. drawn/000"),
        (drawn(5), "embedder.dim 8 is more than 5 training images of 64 values allow; set it to at most 5"),
    ],
    ids=["empty", "all rejected", "ids twice", "too few for PCA"],
)
def test_unusable_sources(ray_cluster, tiny, table, message):
    with pytest.raises(DataError) as error:
        prepare_source(tiny, from_table(table))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert tiny.finished(ROWS) is None


def test_rows_of_a_timm_network(ray_cluster, tmp_path):
    import timm

    arguments = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 28}
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, **arguments)
    torch.save(model.state_dict(), tmp_path / "vit.pt")
    embedder = {"kind": "timm", "model": "vit_small_patch14_dinov2", "model_args": arguments}
    settings = (f"embedder={json.dumps({**embedder, 'checkpoint': str(tmp_path / 'vit.pt')})}",)
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", settings))
    assert prepare_source(run, from_table(drawn(20))).info["embedding_dim"] == 32
    embeddings = matrix(read_artifact(run, ROWS), "embedding")
    assert embeddings.shape == (20, 32)
    assert embeddings.std(axis=0).min() > 0


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 3), ("P", 1)])
def test_decode_to_shape_and_range(mode, channels):
    buffer = io.BytesIO()
    pixels = np.zeros((6, 12, 3), np.uint8)
    pixels[:, :6] = 255
    Image.fromarray(pixels).convert(mode).save(buffer, format="PNG")
    image = decode(buffer.getvalue(), DataConfig(class_names=("a",), channels=channels))
    assert image.shape == (channels, 8, 8)
    assert image.dtype == np.float32
    assert (image[:, :, 0] == 1).all()
    assert (image[:, :, -1] == -1).all()


@settings(deadline=None)
@given(st.data())
def test_a_damaged_image_decodes_or_is_refused(data):
    damaged = bytearray(DIGIT_PNG[: data.draw(st.integers(0, len(DIGIT_PNG)))])
    for position in data.draw(st.lists(st.integers(0, max(0, len(damaged) - 1)), max_size=3)):
        if damaged:
            damaged[position] = data.draw(st.integers(0, 255))
    try:
        image = decode(bytes(damaged), GREY)
    except DECODER_ERRORS:
        return
    assert image.shape == (1, 8, 8)
    assert np.abs(image).max() <= 1


def test_places_are_spread_evenly():
    places = np.sort([place(f"digits/{index:04d}") for index in range(2000)])
    assert np.abs(places - np.linspace(0, 1, 2000)).max() < 0.05
    assert place("digits/0000") == pytest.approx(0.7796, abs=1e-4)
