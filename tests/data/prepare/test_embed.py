"""Decoded chunks become rows: pixels or latents, labels or texts, embeddings; by real networks of random weights."""

import io
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import T5Config, T5EncoderModel

from ddm_ray.config import RunConfig, load_recipe, parse_config
from ddm_ray.core.condition import Text
from ddm_ray.data.images import png, thumbnail
from ddm_ray.data.order import holdout_fractions
from ddm_ray.data.prepare.decoding import DecodedRows, decode_rows
from ddm_ray.data.prepare.embed import Embed
from ddm_ray.data.prepare.records import EmbeddedRows, content_digest
from ddm_ray.data.schema import (
    EMBEDDING,
    TEXT,
    array,
    as_modelled,
    embeddings,
    images,
    read_parquet,
    rows_schema,
    to_parquet,
)
from ddm_ray.data.sources import Encoded
from ddm_ray.data.texts import read_null_text, texts
from ddm_ray.errors import ConfigError
from ddm_ray.models.embedders import PixelEmbedder
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder
from tests.models.test_text import tokenizer
from tests.sampling import tiny_components

pytestmark = [pytest.mark.filterwarnings("error::UserWarning"), pytest.mark.contract]

CAPTIONS = ["a red cat", "", "a blue dog on the moon", "the red dog", "a cat on a red moon on the blue moon the cat"]
T5 = {"vocab_size": 12, "d_model": 20, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def config(embedder: dict[str, Any] | None = None, method: str = "embeddings", **data: Any) -> RunConfig:
    fields = load_recipe("tiny").model_dump(mode="json")
    fields["data"] = {"image_size": 8, "channels": 1, "num_classes": 4} | data
    fields["embedder"] |= embedder or {}
    fields["partition"]["method"] = method
    return parse_config(fields, "test")


def decoded(config: RunConfig, num_rows: int = 5, conditions: list[Any] | None = None) -> DecodedRows:
    channels, height, width = config.data.decoded_shape
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (num_rows, height, width, channels), np.uint8)
    pixels_NHWC.flags.writeable = False  # as of a buffer that another process wrote
    ids = [f"row-{number}" for number in range(num_rows)]
    labels: list[Any] = conditions or [number % 4 for number in range(num_rows)]
    thumbnails = None if config.data.latents is None else [thumbnail(pixels_HWC) for pixels_HWC in pixels_NHWC]
    hashes = [f"{number:064x}" for number in range(num_rows)]
    return DecodedRows(ids, hashes, labels, pixels_NHWC, [], thumbnails=thumbnails)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of an autoencoder (4 channels, 2 pixels a latent), of CLIP's text model and of T5's encoder."""
    root = tmp_path_factory.mktemp("networks")
    tiny_components.autoencoder().save_pretrained(root / "vae")
    tiny_components.text_model().save_pretrained(root / "clip")
    tiny_components.tokenizer(root / "clip").save_pretrained(root / "clip")
    torch.manual_seed(1)
    T5EncoderModel(T5Config(**T5)).save_pretrained(root / "t5")
    tokenizer(begins=False).save_pretrained(root / "t5")
    return {name: str(root / name) for name in ("vae", "clip", "t5")}


def text_data(folders: dict[str, str], **text: Any) -> dict[str, Any]:
    return {
        "channels": 4,
        "num_classes": None,
        "latents": {"autoencoder": folders["vae"], "downsampling": 2, "scale": 0.5, "shift": 0.1},
        "text": {"encoder": folders["t5"], "tokens": 10, "dim": 20, **text},
    }


@pytest.mark.parametrize("stored", ["features", "ids"])
def test_captions_that_are_cut_off_are_told(folders: dict[str, str], stored: str) -> None:
    """Of the text encoder's 8 tokens the last one ends the text."""
    run = config({"dim": 2}, **text_data(folders, tokens=8, stored=stored), heldout=0)
    chunk = decoded(run, len(CAPTIONS), [caption or "a" for caption in CAPTIONS])
    made = Embed(run, PixelEmbedder.fit(chunk.pixels_NHWC, 2))(chunk)
    reason = "a caption of 13 tokens, of which 8 count, is cut off"
    assert made.losses == [{"id": "row-4", "reason": reason}] and made.table.num_rows == len(CAPTIONS)


def test_pixels_and_labels_are_rows() -> None:
    run = config({"dim": 3, "batch_size": 2}, heldout=0.4)
    chunk = decoded(run, num_rows=40)
    embedder = PixelEmbedder.fit(chunk.pixels_NHWC, 3)
    embed = Embed(run, embedder)
    table = embed(chunk).table
    assert table.schema == rows_schema(run.data, 3)
    assert (embed.embedding_dim, embed.null_text()) == (3, None)
    again = read_parquet(to_parquet(table), "here")
    assert again.schema.equals(table.schema)
    assert again["id"].to_pylist() == chunk.ids
    assert again["content_hash"].to_pylist() == chunk.content_hashes
    assert again["label"].to_pylist() == chunk.conditions
    pixels_NCHW = chunk.pixels_NHWC.transpose(0, 3, 1, 2)
    assert np.array_equal(array(again["data"], np.dtype("u1"), run.data.shape), pixels_NCHW)
    assert np.array_equal(images(again, run.data), as_modelled(pixels_NCHW))
    assert np.array_equal(embeddings(again), embedder(chunk.pixels_NHWC))
    expected = ["heldout" if place < 0.4 else "train" for place in holdout_fractions(chunk.ids)]
    assert again["split"].to_pylist() == expected
    assert 0 < expected.count("heldout") < 40


def test_colours_keep_their_places() -> None:
    run = config({"dim": 2}, channels=3)
    chunk = decoded(run)
    table = Embed(run, PixelEmbedder.fit(chunk.pixels_NHWC, 2))(chunk).table
    stored_NCHW = array(table["data"], np.dtype("u1"), (3, 8, 8))
    assert stored_NCHW[4, 2, 5, 7] == chunk.pixels_NHWC[4, 5, 7, 2]


def test_a_rows_bytes_do_not_depend_on_its_chunk() -> None:
    run = config({"dim": 3, "batch_size": 4})
    chunk = decoded(run, num_rows=9)
    embed = Embed(run, PixelEmbedder.fit(chunk.pixels_NHWC, 3))
    alone = [
        DecodedRows([row_id], [digest], [label], pixels_HWC[None], [])
        for row_id, digest, label, pixels_HWC in zip(
            chunk.ids, chunk.content_hashes, [int(label) for label in chunk.conditions], chunk.pixels_NHWC, strict=True
        )
    ]
    assert pa.concat_tables([embed(row).table for row in alone]).combine_chunks() == embed(chunk).table


def test_a_chunk_without_usable_rows_is_an_empty_table() -> None:
    run = config({"dim": 3})
    embed = Embed(run, PixelEmbedder.fit(decoded(run).pixels_NHWC, 3))
    empty = DecodedRows([], [], [], np.empty((0, 8, 8, 1), np.uint8), [])
    assert embed(empty).table.num_rows == 0
    assert embed(empty).table.schema == rows_schema(run.data, embed.embedding_dim)


def test_given_shards_have_no_embedding() -> None:
    run = config({"kind": "timm", "model": "no_such_net"}, "given")
    embed = Embed(run, None)
    table = embed(decoded(run)).table
    assert embed.embedding_dim == 0
    assert "embedding" not in table.column_names
    assert table.schema == rows_schema(run.data, 0)


def test_latents_and_texts_are_the_networks_own(folders: dict[str, str]) -> None:
    """T5's tokens with CLIP's pooled vector; networks see two rows at a time, and one in the end."""
    text = {"pooled_encoder": folders["clip"], "pooled_dim": tiny_components.TEXT_DIM}
    run = config({"dim": 3, "batch_size": 2}, **text_data(folders, **text))
    assert run.data.latents is not None
    assert run.data.text is not None
    chunk = decoded(run, conditions=CAPTIONS)
    embedder = PixelEmbedder.fit(chunk.pixels_NHWC, 3)
    embed = Embed(run, embedder)
    table = read_parquet(to_parquet(embed(chunk).table), "here")
    assert table.schema.equals(rows_schema(run.data, 3))
    assert table["text"].to_pylist() == CAPTIONS

    images_NCHW = torch.from_numpy(as_modelled(chunk.pixels_NHWC.transpose(0, 3, 1, 2)))
    latents_NCHW = Latents.from_config(run.data.latents).encode(images_NCHW)
    np.testing.assert_allclose(images(table, run.data), latents_NCHW, rtol=1e-3, atol=1e-5)
    assert latents_NCHW.shape == (5, 4, 8, 8)
    assert np.array_equal(embeddings(table), embedder(chunk.pixels_NHWC))
    thumbnails = [Image.open(io.BytesIO(data)) for data in table["thumbnail"].to_pylist()]
    assert [(image.size, image.format) for image in thumbnails] == [((16, 16), "JPEG")] * 5

    stored = texts(table["text_tokens"].to_pylist(), array(table["text_pooled"], TEXT), run.data.text)
    encoder = TextEncoder.from_config(run.data.text)
    assert_close(stored, encoder.encode(CAPTIONS, warn=False))
    assert stored.mask_BL.sum(1).tolist() == [4, 1, 7, 4, 10]
    null = embed.null_text()
    assert null is not None
    assert_close(read_null_text(null, "here", run.data.text), encoder.null())


def test_thumbnails_are_made_where_images_are_decoded(folders: dict[str, str]) -> None:
    """For latents alone, of usable rows, in their order; by threads or without."""
    latents, pixels = config(**text_data(folders)), config()
    size = latents.data.decoded_shape[1:]
    shades = [np.full((*size, 3), shade, np.uint8) for shade in (0, 90, 250)]
    rows = [Encoded(f"{number}", png(pixels_HWC), "a cat") for number, pixels_HWC in enumerate(shades)]
    rows.insert(1, Encoded("damaged", b"no image", "a cat"))
    with ThreadPoolExecutor(2) as pool:
        for made in (decode_rows(rows, latents.data), decode_rows(rows, latents.data, pool)):
            assert made.ids == ["0", "1", "2"] and made.thumbnails is not None
            assert made.thumbnails == [thumbnail(pixels_HWC) for pixels_HWC in made.pixels_NHWC]
            assert [Image.open(io.BytesIO(data)).getpixel((0, 0)) for data in made.thumbnails] == [
                (shade, shade, shade) for shade in (0, 90, 250)
            ]
    assert decode_rows(rows, pixels.data).thumbnails is None


def test_mirror_images_are_encoded_as_images_are(folders: dict[str, str]) -> None:
    """Their latents stand beside the others, which are as without them, as is what is clustered."""
    plain, both = (config({"dim": 2}, **text_data(folders), horizontal_flips=on) for on in (False, True))
    chunk = decoded(both, conditions=CAPTIONS)
    embedder = PixelEmbedder.fit(chunk.pixels_NHWC, 2)
    without, table = (Embed(run, embedder)(chunk).table for run in (plain, both))
    assert table.schema == rows_schema(both.data, 2)
    assert table.drop(["mirrored"]).select(without.column_names).equals(without)
    assert both.data.latents is not None
    mirrored_NCHW = torch.from_numpy(as_modelled(chunk.pixels_NHWC.transpose(0, 3, 1, 2))).flip(3)
    expected_NCHW = Latents.from_config(both.data.latents).encode(mirrored_NCHW)
    stored_NCHW = array(table["mirrored"], TEXT, both.data.shape)
    np.testing.assert_allclose(stored_NCHW, expected_NCHW, rtol=1e-3, atol=1e-4)
    assert np.abs(stored_NCHW - images(table, both.data)[..., ::-1]).max() > 0.01, "it isn't the mirrored latent"


def test_what_is_clustered_is_the_middle_of_a_larger_image() -> None:
    run = config({"dim": 2}, crop_margin=3)
    chunk = decoded(run, num_rows=6)
    assert chunk.pixels_NHWC.shape == (6, 11, 11, 1)
    middle_NHWC = chunk.pixels_NHWC[:, 1:9, 1:9]
    embedder = PixelEmbedder.fit(middle_NHWC, 2)
    table = Embed(run, embedder)(chunk).table
    assert np.array_equal(embeddings(table), embedder(middle_NHWC))
    assert np.array_equal(array(table["data"], np.dtype("u1"), (1, 11, 11)), chunk.pixels_NHWC.transpose(0, 3, 1, 2))
    assert np.array_equal(images(table, run.data), as_modelled(middle_NHWC.transpose(0, 3, 1, 2)))


def test_one_encoder_gives_tokens_and_pooled_vector(folders: dict[str, str]) -> None:
    """Captions that are too long are cut without a word for each of millions."""
    size = {"encoder": folders["clip"], "tokens": 6, "dim": tiny_components.TEXT_DIM}
    run = config({"dim": 3}, **text_data(folders, **size, pooled_dim=tiny_components.TEXT_DIM))
    assert run.data.text is not None
    chunk = decoded(run, 3, ["a b", "", "a b c d e f g"])
    table = Embed(run, PixelEmbedder.fit(chunk.pixels_NHWC, 3))(chunk).table
    stored = texts(table["text_tokens"].to_pylist(), array(table["text_pooled"], TEXT), run.data.text)
    assert_close(stored, TextEncoder.from_config(run.data.text).encode(["a b", "", "a b c d e f g"], warn=False))


def test_a_networks_embedding_is_a_column(tmp_path: Path) -> None:
    size = {"embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 16}
    torch.manual_seed(0)
    weights = timm.create_model("vit_tiny_patch16_224", num_classes=0, **size).state_dict()
    save_file(weights, tmp_path / "good.safetensors")
    save_file(weights | {"norm.bias": torch.full((16,), float("nan"))}, tmp_path / "broken.safetensors")

    def embed(name: str, num_rows: int) -> EmbeddedRows:
        changes = {"checkpoint": str(tmp_path / name), "model": "vit_tiny_patch16_224", "model_args": size}
        run = config({"kind": "timm", "batch_size": 2, **changes})
        return Embed(run, None)(decoded(run, num_rows))

    table = embed("good.safetensors", 5).table
    assert array(table["embedding"], EMBEDDING).shape == (5, 16)
    np.testing.assert_allclose(embeddings(embed("good.safetensors", 1).table)[0], embeddings(table)[0], atol=1e-5)
    reason = "embedder timm vit_tiny_patch16_224: gives NaN or infinity"
    few = embed("broken.safetensors", 2)
    assert few.table.num_rows == 0
    assert few.rejected == [{"id": "row-0", "reason": reason}, {"id": "row-1", "reason": reason}]


@pytest.mark.parametrize("damage", ["latents", "tokens"])
def test_rows_that_float16_does_not_hold_are_left_out(folders: dict[str, str], damage: str) -> None:
    """One image's latents, or one word's vector, are too large; the other rows are as without them."""
    run = config({"dim": 3, "batch_size": 2}, **text_data(folders))
    chunk = decoded(run, 8, ["a cat", "the dog", "a cat", "a red cat", "a cat", "on the moon", "a cat", "a blue cat"])
    embed = Embed(run, PixelEmbedder.fit(chunk.pixels_NHWC, 3))
    undamaged = embed(chunk).table
    assert embed._images is not None
    assert embed._texts is not None
    network: Any = embed._images._latents if damage == "latents" else embed._texts._encoder
    encode, calls = network.encode, {"seen": 0}

    def overflowing(batch: Any, **options: Any) -> Any:
        number, calls["seen"] = calls["seen"], calls["seen"] + 1
        values = encode(batch, **options)
        if number == 1:
            (values if damage == "latents" else values.tokens_BLE)[1].fill_(1e6)
        return values

    network.encode = overflowing
    rows = embed(chunk)
    assert [entry["id"] for entry in rows.rejected] == ["row-3"]
    assert rows.rejected[0]["reason"].endswith(": gives NaN or infinity, or more than float16 holds")
    assert rows.table.equals(pa.concat_tables([undamaged.slice(0, 3), undamaged.slice(4)]))
    assert content_digest(rows.table) == content_digest(pa.concat_tables([undamaged.slice(0, 3), undamaged.slice(4)]))


def test_networks_of_other_sizes_are_refused(folders: dict[str, str]) -> None:
    """As they are loaded; test_known_sizes has all ways in which they can be others."""
    for data, message in (
        (text_data(folders) | {"channels": 3}, r"begin a run with data\.channels=4$"),
        (text_data(folders, dim=16), r"has 20 channels, not 16; begin a run with data\.text\.dim=20$"),
    ):
        run = config({"dim": 3}, **data)
        with pytest.raises(ConfigError, match=f"^[^\n]*{message}"):
            Embed(run, no_components(math.prod(run.data.pixel_shape)))


def no_components(num_values: int) -> PixelEmbedder:
    return PixelEmbedder(np.zeros(num_values), np.zeros((3, num_values)))


def assert_close(stored: Text, encoded: Text) -> None:
    """Within float16's half a unit in the last place, of numbers near one."""
    assert torch.equal(stored.mask_BL, encoded.mask_BL)
    torch.testing.assert_close(stored.tokens_BLE, encoded.tokens_BLE, rtol=1e-3, atol=1e-5)
    assert (stored.pooled_BP is None) == (encoded.pooled_BP is None)
    if stored.pooled_BP is not None:
        torch.testing.assert_close(stored.pooled_BP, encoded.pooled_BP, rtol=1e-3, atol=1e-5)
