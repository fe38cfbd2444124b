"""How images fit their texts, by a real CLIP of random weights; no download."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from torch.nn.functional import cosine_similarity

from ddm_ray.config import load_recipe
from ddm_ray.data.loading.loader import load_rows
from ddm_ray.data.schema import shard_schema
from ddm_ray.errors import ConfigError, CorruptArtifact
from ddm_ray.evaluate.captions import CaptionScore
from ddm_ray.evaluate.compare import Side
from ddm_ray.evaluate.report import report_table
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.models.clip import Clip
from ddm_ray.run.graph import evaluation, shard
from ddm_ray.run.run import Run
from tests import random_run
from tests.sampling import tiny_components
from tests.text_run import make_text_run

pytestmark = pytest.mark.contract

SMALL = ("evaluate.strategies=[once]", "evaluate.num_samples=24", "sample={steps: 1}")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a CLIP whose tokenizer knows single letters."""
    folder = tmp_path_factory.mktemp("clip") / "clip-tiny"
    words = tiny_components.text_model().config.to_dict()
    vision = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 7}
    torch.manual_seed(3)
    model = tf.CLIPModel(tf.CLIPConfig(text_config=words, vision_config=vision, projection_dim=10))
    for parameter in model.parameters():  # as they are drawn, all images look alike to it
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tiny_components.tokenizer(folder).save_pretrained(folder)
    tf.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(clip: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_text_run(tmp_path_factory.mktemp("captions"), (*SMALL, f"evaluate.clip={clip}"))
    evaluate(run)
    return run


def expected_scores(clip: str, images_NCHW: torch.Tensor, captions: list[str]) -> np.ndarray:
    """By transformers alone."""
    model = tf.CLIPModel.from_pretrained(clip).eval()
    pixels = list(((images_NCHW + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy())
    images = tf.CLIPImageProcessor.from_pretrained(clip)(images=pixels, return_tensors="pt")
    texts = tf.CLIPTokenizer.from_pretrained(clip)(
        captions, padding=True, truncation=True, max_length=tiny_components.TOKENS, return_tensors="pt"
    )
    with torch.inference_mode():
        output = model(**images, input_ids=texts["input_ids"], attention_mask=texts["attention_mask"])
    return (100 * cosine_similarity(output.image_embeds, output.text_embeds)).clamp(min=0).numpy()


def test_an_evaluation_tells_the_score_of_each_images_own_text(run: Run, clip: str) -> None:
    shown = load_rows(run, [shard(0), shard(1)], "heldout")
    (sampled,) = Side(run, "demo", "run").sampled()
    images_MCHW, numbers = torch.cat([*sampled.images()]), sampled.number_M.tolist()
    assert shown.captions is not None and len({*shown.captions}) > 3
    scores = expected_scores(clip, images_MCHW, [shown.captions[number] for number in numbers])
    others = expected_scores(clip, images_MCHW, [shown.captions[number - 1] for number in numbers])
    (once,) = read_metrics(run)["models"]
    assert once["clip"] == pytest.approx(scores.mean(), rel=1e-4)
    assert once["clip_std"] == pytest.approx(scores.std(ddof=1) / len(scores) ** 0.5, rel=1e-3)
    assert abs(scores.mean() - others.mean()) > 0.01, "else another image's text would do"
    real = {row["model"]: row.get("clip") for row in read_metrics(run)["real"]}
    assert [name for name, score in real.items() if score is not None] == ["real: 10 held out"]
    page = run.read(evaluation("demo"), "report.html").decode()
    assert "CLIP score: 100 times the cosine" in page and "clip-tiny" in page and clip not in page


def test_captions_are_stored_beside_the_texts_that_they_became(run: Run) -> None:
    shown = load_rows(run, [shard(0), shard(1)], "heldout")
    assert shown.captions is not None and shown.text is not None
    lengths_N = shown.text.mask_BL.sum(1)
    assert [len(caption.split()) for caption in shown.captions] == lengths_N.tolist()
    assert load_rows(run, [shard(0)], "train", with_texts=False).captions is None


def test_shards_of_an_older_version_have_no_score_and_it_is_told(
    clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_run, "shard_file_schema", shard_schema)  # its shards had no captions
    old = make_text_run(tmp_path, (*SMALL, f"evaluate.clip={clip}"))
    evaluate(old)
    metrics = read_metrics(old)
    assert "clip" not in metrics["models"][0] and metrics["clip"] is None
    assert metrics["missing"]["clip"].startswith("CLIP score (the shards, of an older version, keep no captions")
    assert "Not measured: CLIP score" in report_table(metrics)


def test_what_it_cannot_score_with_is_refused(clip: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.clip compares images with texts, and data\.text is none"):
        load_recipe("tiny", (f"evaluate.clip={clip}",))
    tiny_components.text_model().save_pretrained(tmp_path / "half")
    with pytest.raises(ConfigError, match="half: is a clip_text_model, not a CLIP"):
        Clip.from_pretrained(str(tmp_path / "half"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[")
    with pytest.raises(CorruptArtifact, match="not JSON"):
        Clip.from_pretrained(str(tmp_path / "broken"))


def test_long_texts_are_cut_as_clip_does_and_grey_images_taken_as_colour(clip: str) -> None:
    scorer = Clip.from_pretrained(clip)
    long = "a b c d e f g h i j k l m n"
    vectors = scorer.texts([long, long[:13], "z"])
    assert torch.equal(vectors[0], vectors[1]) and not torch.equal(vectors[0], vectors[2])
    grey = np.random.default_rng(0).integers(0, 255, (3, 20, 20, 1), np.uint8)
    assert torch.equal(scorer.images(grey), scorer.images(grey.repeat(3, axis=3)))
    score = CaptionScore(scorer, -scorer.images(grey)).score(
        [torch.from_numpy(grey).permute(0, 3, 1, 2) / 127.5 - 1], torch.arange(3)
    )
    assert score["clip"] == 0, "opposite to its text is as bad as unlike it"
