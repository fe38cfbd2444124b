"""A pipeline saved in diffusers' layout: the same images afterwards, and what is wrong with a folder said by name."""

import json
import multiprocessing
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core.flow import PREDICTIONS, Flow
from ddm_ray.core.snr import MatchedRouter, VelocityField
from ddm_ray.errors import CorruptArtifact, SamplingError, StorageError
from ddm_ray.models.diffusers_transformer import DiffusersTransformer
from ddm_ray.models.null_text import NULL_TEXT
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.manifest import FileRecord, canonical, sha256
from ddm_ray.sampling.pretrained import WEIGHTS
from ddm_ray.sampling.run_models import Models
from tests.sampling import tiny_components
from tests.sampling.tiny_components import NUM_EXPERTS, classes, models, texts

pytestmark = pytest.mark.contract

SETTINGS: dict[str, Any] = {"seeds": 7, "num_inference_steps": 3, "output_type": "latent"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "pipeline"
    classes().save_pretrained(folder)
    return folder


def same_images(first: DDMPipeline, second: DDMPipeline, **arguments: Any) -> None:
    for strategy in ("once", "full", "top-2"):
        for scale in (1.0, 3.0):
            pipeline_inputs = {**SETTINGS, "strategy": strategy, "guidance_scale": scale, **arguments}
            assert torch.equal(first(**pipeline_inputs).images, second(**pipeline_inputs).images)


def test_the_layout_is_that_of_diffusers(saved: Path) -> None:
    index = json.loads((saved / "model_index.json").read_text())
    assert index["_class_name"] == "DDMPipeline"
    assert (index["expert_003"], index["router"]) == (["ddm_ray", "DiT"], ["ddm_ray", "Router"])
    config = json.loads((saved / "expert_001/config.json").read_text())
    assert (config["_class_name"], config["adaln"]) == ("DiT", "single")
    assert config["flow"] == {"path": "linear", "prediction": "velocity"}
    folders = {f"expert_{k:03d}" for k in range(NUM_EXPERTS)} | {"router"}
    expected = {f"{folder}/{name}" for folder in folders for name in ("config.json", WEIGHTS)}
    assert set(index["files"]) == expected
    assert {path.relative_to(saved).as_posix() for path in saved.rglob("*.*")} == expected | {"model_index.json"}
    assert not list(saved.parent.glob(".*"))


@pytest.mark.parametrize("offload", [None, "disk"])
def test_classes_survive_a_round_trip(saved: Path, offload: str | None) -> None:
    same_images(classes(), DDMPipeline.from_pretrained(saved, offload=offload), prompt=["owl", "", "cat"], batch_size=1)


def test_texts_survive_a_round_trip(tmp_path: Path) -> None:
    pipeline = texts(tmp_path / "tokenizer")
    pipeline.save_pretrained(tmp_path / "saved")
    again = DDMPipeline.from_pretrained(tmp_path / "saved")
    same_images(pipeline, again, prompt=["a cat", "", "dog"])
    same_images(pipeline, again, prompt=["a cat"], output_type="pt")


def test_a_folder_saved_before_is_read(tmp_path: Path) -> None:
    """Then the temperature stood beside the defaults, the kind of guidance and the null text had other names.

    And a field said under which prior the router was trained: always the data's.
    """
    pipeline = texts(tmp_path / "tokenizer")
    defaults = SamplingSettings(strategy="full", guidance_kind="per-expert", router_temperature=1.7)
    DDMPipeline(pipeline.models, defaults=defaults).save_pretrained(folder := tmp_path / "saved")
    null = pipeline.models.info.null_text
    old = {"tokens_BLE": null.tokens_BLE, "mask_BL": null.mask_BL, "pooled_BP": null.pooled_BP}
    (folder / NULL_TEXT).write_bytes(safetensors.torch.save(old))
    index = json.loads((folder / "model_index.json").read_text())
    del index["checksum"]
    index["router_temperature"] = index["defaults"].pop("router_temperature")
    index["defaults"]["guidance"] = index["defaults"].pop("guidance_kind")
    index["router_prior_K"] = None
    index["files"][NULL_TEXT] = asdict(FileRecord.of_file(folder / NULL_TEXT))
    (folder / "model_index.json").write_text(json.dumps({**index, "checksum": sha256(canonical(index))}))
    again = DDMPipeline.from_pretrained(folder)
    assert again.components.defaults == defaults
    for name, tensor in vars(null).items():
        assert torch.equal(getattr(again.models.info.null_text, name), tensor)


def test_two_text_encoders_survive_a_round_trip(tmp_path: Path) -> None:
    pipeline = texts(tmp_path / "tokenizer")
    pipeline.components.text_encoder.pooled = tiny_components.text_encoder(tmp_path / "pooled", seed=5)
    pipeline.save_pretrained(tmp_path / "saved")
    reloaded = DDMPipeline.from_pretrained(tmp_path / "saved").components.text_encoder.encode(["a cat"])
    expected = pipeline.components.text_encoder.encode(["a cat"])
    assert torch.equal(reloaded.pooled_BP, expected.pooled_BP)
    assert torch.equal(reloaded.tokens_BLE, expected.tokens_BLE)


def test_diffusers_transformers_survive_a_round_trip(tmp_path: Path) -> None:
    """A mixture of a DiT and an SD3-style one, without a router; prompts come encoded."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8, "in_channels": 4}
    sizes |= {"out_channels": 4, "pos_embed_max_size": 8, "joint_attention_dim": tiny_components.TEXT_DIM}
    sizes |= {"pooled_projection_dim": tiny_components.TEXT_DIM, "caption_projection_dim": 16}
    sd3 = tiny_components.random(DiffusersTransformer, 1, name="SD3Transformer2DModel", arguments=sizes)
    before = models("texts")
    info = replace(before.info, num_experts=2, prior_CK=torch.ones(1, 2, dtype=torch.float64) / 2)
    pipeline = DDMPipeline(Models(info, (before.experts[0], sd3), None))
    pipeline.save_pretrained(tmp_path / "saved")
    again = DDMPipeline.from_pretrained(tmp_path / "saved")
    text = tiny_components.text_encoder(tmp_path / "tokenizer").encode(["a cat", "dog"])
    pipeline_inputs = {**SETTINGS, "prompt": text, "strategy": "oracle", "clusters": [0, 1]}
    assert torch.equal(pipeline(**pipeline_inputs).images, again(**pipeline_inputs).images)


def test_other_paths_and_predictions_survive_a_round_trip(tmp_path: Path) -> None:
    flows = tuple(Flow(path, prediction) for path in ("cosine", "ddpm") for prediction in PREDICTIONS[:2])
    pipeline = classes(flows=flows, router_path="cosine")
    pipeline.save_pretrained(tmp_path / "saved")
    again = DDMPipeline.from_pretrained(tmp_path / "saved")
    assert all(isinstance(expert, VelocityField) for expert in again.models.experts)
    assert [expert.flow for expert in again.models.experts] == list(flows)
    assert isinstance(again.models.router, MatchedRouter)
    same_images(pipeline, again, prompt=["owl", "cat"])


def test_what_a_mixture_knows_survives_a_round_trip(tmp_path: Path) -> None:
    before = models()
    info = replace(
        before.info,
        available_K=torch.tensor([True, True, False, True]),
        dtype=torch.float64,
        trained_null=False,
    )
    experts = (before.experts[0].double(), before.experts[1].double(), before.experts[2].double(), None)
    defaults = SamplingSettings(
        strategy="nucleus-0.9", steps=4, times="shifted-3", guidance_interval=(0.1, 0.9), router_temperature=1.7
    )
    pipeline = DDMPipeline(Models(info, experts, None), class_names="cdo", defaults=defaults)
    pipeline.save_pretrained(tmp_path / "saved")
    again = DDMPipeline.from_pretrained(tmp_path / "saved")
    assert again.components.defaults == defaults
    assert again.components.class_names == ("c", "d", "o")
    for name, value in vars(info).items():
        reloaded = getattr(again.models.info, name)
        assert torch.equal(reloaded, value) if isinstance(value, torch.Tensor) else reloaded == value
    assert again.models.router is None
    assert [expert is None for expert in again.models.experts] == [False, False, False, True]
    with pytest.raises(SamplingError, match="null condition"):
        again("d", guidance_scale=2.0, strategy="once")


def test_once_asks_the_router_where_no_prior_is_known(tmp_path: Path) -> None:
    before = models()
    DDMPipeline(replace(before, info=replace(before.info, prior_CK=None))).save_pretrained(tmp_path / "saved")
    again = DDMPipeline.from_pretrained(tmp_path / "saved")
    assert again.models.info.prior_CK is None
    assert again(class_labels=1, num_images_per_prompt=6, **SETTINGS | {"strategy": "once"}).num_router_rows == 6
    without = DDMPipeline(replace(again.models, router=None))
    with pytest.raises(SamplingError, match="'once' needs the router, which isn't there: use oracle"):
        without(class_labels=1, **SETTINGS | {"strategy": "once"})


def test_experts_offloaded_to_disk_are_read_when_they_are_called(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "pipeline")
    pipeline = DDMPipeline.from_pretrained(folder, offload="disk")
    assert pipeline.models.experts.num_fetched == 0
    file = folder / "expert_002" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-4] + b"oops")
    assert pipeline("cat", strategy="oracle", clusters=1, **SETTINGS).images.isfinite().all()
    with pytest.raises(CorruptArtifact, match=rf"expert_002/{WEIGHTS}: checksum"):
        pipeline("cat", strategy="oracle", clusters=2, **SETTINGS)


def test_a_pipeline_is_replaced_only_when_that_is_wanted(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "pipeline")
    other = DDMPipeline(models("nothing"))
    with pytest.raises(SamplingError, match="is a pipeline already: use overwrite=True"):
        other.save_pretrained(folder)
    other.save_pretrained(folder, overwrite=True)
    assert DDMPipeline.from_pretrained(folder).models.info.num_classes == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline"]
    # From a folder into itself, its experts being read from it.
    DDMPipeline.from_pretrained(folder, offload="disk").save_pretrained(folder, overwrite=True)
    assert DDMPipeline.from_pretrained(folder)([""], **SETTINGS).images.isfinite().all()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    with pytest.raises(SamplingError, match="mine is there and no pipeline of ours"):
        other.save_pretrained(tmp_path / "mine", overwrite=True)
    with pytest.raises(StorageError, match=r"thesis\.txt/below: can't be saved: Not a directory"):
        other.save_pretrained(tmp_path / "mine/thesis.txt/below")
    (tmp_path / "empty").mkdir()
    other.save_pretrained(tmp_path / "empty")
    assert DDMPipeline.from_pretrained(tmp_path / "empty").models.info.num_experts == NUM_EXPERTS


def test_a_killed_save_leaves_no_half_pipeline(tmp_path: Path) -> None:
    """Killed at different moments of one save after the other: a folder is whole, or not there at all."""
    pipeline = classes()

    def save_many(prefix: str) -> None:
        for number in range(1000):
            pipeline.save_pretrained(tmp_path / f"{prefix}-{number:03d}")

    for number, delay in enumerate((0.5, 0.513, 0.527)):
        process = multiprocessing.get_context("fork").Process(target=save_many, args=(f"pipeline-{number}",))
        process.start()
        time.sleep(delay)
        process.kill()
        process.join()
    finished = sorted(path for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert finished
    for number in range(3):
        for folder in [folder for folder in finished if folder.name.startswith(f"pipeline-{number}")][-2:]:
            DDMPipeline.from_pretrained(folder)
    same_images(pipeline, DDMPipeline.from_pretrained(finished[-1]), prompt=["owl"])


def test_what_host_memory_keeps_is_not_saved(saved: Path, tmp_path: Path) -> None:
    pipeline = DDMPipeline.from_pretrained(saved, offload="host")
    with pytest.raises(SamplingError, match="expert_000 can't be saved: it is offloaded to host memory"):
        pipeline.save_pretrained(tmp_path / "other")
    assert not list(tmp_path.iterdir())
