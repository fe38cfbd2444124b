"""Networks by content: rows know which made them, no rows mix two, and nobody decodes by another than that."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddm_ray.config import load_recipe
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.records import rows_store
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import DataError, DriftError
from ddm_ray.evaluate.candidates import decoder
from ddm_ray.models.fingerprints import fingerprint_of
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder
from ddm_ray.pictures.png import to_png
from ddm_ray.run.graph import PARTITION, ROWS, Artifact, owner_rows, shard
from ddm_ray.run.identity import fields_of
from ddm_ray.run.info import PartitionInfo, RowsInfo, ShardInfo
from ddm_ray.run.manifest import NAME, Manifest
from ddm_ray.run.run import Run
from tests.models.test_text import tokenizer
from tests.sampling import tiny_components

pytestmark = pytest.mark.contract


def save_vae(folder: Path, seed: int) -> None:
    """An autoencoder of random weights, in place of another one."""
    torch.manual_seed(seed)
    vae = tiny_components.autoencoder()
    with torch.no_grad():
        next(vae.parameters()).add_(seed)
    vae.save_pretrained(folder)


@pytest.fixture
def vae(tmp_path: Path) -> Path:
    """The folder of an autoencoder, beside one of photographs."""
    save_vae(tmp_path / "vae", 0)
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(0, 256, (8, 8, 3), np.uint8)
            (tmp_path / "photos" / name / f"{number:02d}.png").write_bytes(to_png(Image.fromarray(pixels)))
    return tmp_path / "vae"


def begin(folder: Path, *settings: str) -> Run:
    photos, latents = folder.parent / "photos", folder.parent / "vae"
    data = f"data={{source: {photos}, image_size: 4, channels: 4, class_names: [cats, dogs], heldout: 0.2}}"
    of_vae = f"data.latents={{autoencoder: {latents}, downsampling: 2, scale: 1.0}}"
    return Run.create(str(folder), load_recipe("tiny", (data, of_vae, *settings)))


def test_rows_and_their_partition_know_the_networks_that_made_them(tmp_path: Path, vae: Path) -> None:
    run = begin(tmp_path / "run")
    networks = RowsInfo.of(prepare(run, execute=serial)).networks
    assert networks == {"autoencoder": Latents.from_config(run.config.data.latents).fingerprint()}
    partition(run, with_report=False)
    assert PartitionInfo.of(run.require(PARTITION)).networks == networks
    decoder(run, "cpu")
    save_vae(vae, 1)
    with pytest.raises(
        DriftError, match=rf"autoencoder {vae}: its fingerprint is \w+, and .*{networks['autoencoder']}"
    ):
        decoder(run, "cpu")


def test_rows_of_two_networks_are_never_mixed(tmp_path: Path, vae: Path) -> None:
    run = begin(tmp_path / "run")
    prepare(run, chunk_rows=16, execute=serial)
    chunks = rows_store(run, ROWS)
    run.store.delete_one(f"{ROWS}/{NAME}")
    last = chunks.finished_keys()[-1]
    run.store.delete_one(f"{ROWS}/_parts/{last.record_name}")
    save_vae(vae, 1)
    with pytest.raises(DriftError, match="autoencoder: its fingerprint is"):
        prepare(run, chunk_rows=16, execute=serial)
    save_vae(vae, 0)
    prepare(run, chunk_rows=16, execute=serial)


def test_owners_with_other_networks_cannot_be_put_together(tmp_path: Path, vae: Path) -> None:
    centre, given = begin(tmp_path / "centre", "partition.method=given"), "partition.method=given"
    for cluster in range(2):
        save_vae(vae, cluster)
        own = begin(tmp_path / f"owner-{cluster}", given)
        prepare(own, source=str(tmp_path / "photos"), cluster=cluster, execute=serial)
        manifest = partition(own, cluster=cluster)
        assert ShardInfo.of(manifest).networks == RowsInfo.of(own.require(owner_rows(cluster))).networks
        centre.store.write(f"{shard(cluster)}/{NAME}", manifest.to_json())
    with pytest.raises(DataError, match=r"cluster=001: its rows were made with another autoencoder"):
        partition(centre)


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    network = torch.nn.Linear(3, 2)
    own = fingerprint_of(network)
    same = torch.nn.Linear(3, 2)
    same.load_state_dict(network.state_dict())
    assert fingerprint_of(same) == own
    assert fingerprint_of(same, [1.0]) != own
    with torch.no_grad():
        same.bias[0] = torch.nextafter(same.bias[0], torch.tensor(9.0))
    assert fingerprint_of(same) != own
    assert fingerprint_of(network.double()) != own


def test_another_vocabulary_is_another_text_encoder(tmp_path: Path) -> None:
    tiny_components.text_model().save_pretrained(tmp_path)
    words = tiny_components.tokenizer(tmp_path)
    one = TextEncoder(words, tiny_components.text_model(), 5)
    assert one.fingerprint() == TextEncoder(words, tiny_components.text_model(), 5).fingerprint()
    others = (
        TextEncoder(words, tiny_components.text_model(), 4),
        TextEncoder(words, tiny_components.text_model(1), 5),
        TextEncoder(tokenizer(begins=False), tiny_components.text_model(), 5),
        TextEncoder(words, tiny_components.text_model(), 5, pooled=one),
    )
    assert len({one.fingerprint(), *(other.fingerprint() for other in others)}) == 5


@pytest.mark.parametrize("artifact", ["rows", "experts/000"])
def test_where_a_source_lies_and_how_many_rows_run_at_once_is_no_identity(tmp_path: Path, artifact: str) -> None:
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny"))
    moved = load_recipe("tiny", ("data.source=/elsewhere", "embedder.batch_size=7"))
    assert fields_of(moved, Artifact(artifact)) == fields_of(run.config, Artifact(artifact))
    # Of an older version, which took them for part of it.
    made = run.identity(Artifact(artifact))
    made.fields["data"]["source"] = "/elsewhere"
    if "embedder" in made.fields:
        made.fields["embedder"]["batch_size"] = 7
    old = Manifest(artifact, made, {}, {})
    assert run.drift(Artifact(artifact), Manifest.from_json(old.to_json(), "").identity) == []
    made.fields["data"]["heldout"] = 0.3
    assert run.drift(Artifact(artifact), made) == ["data.heldout: 0.3 -> 0.1"]
