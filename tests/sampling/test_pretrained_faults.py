"""What can be wrong with a saved pipeline, or with models put together: one line each, naming the file or the model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddm_ray.errors import CorruptArtifact, DDMError, ExpertCountError, MissingArtifact, RunError, SamplingError
from ddm_ray.models.router import Router
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.manifest import canonical, sha256
from ddm_ray.sampling.pretrained import WEIGHTS
from ddm_ray.sampling.run_models import Models
from tests.sampling.tiny_components import classes, models, random, texts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "pipeline"
    classes().save_pretrained(folder)
    return folder


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the index as another program of the same layout would have written it, checksum and all."""
    index = json.loads(path.read_text())
    index.pop("checksum")
    change(index)
    path.write_text(json.dumps({**index, "checksum": sha256(canonical(index))}))


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda root: edit(root / "model_index.json", change)


def written(name: str, text: str) -> Callable[[Path], None]:
    """The file has another text, and the index knows it."""

    def fault(root: Path) -> None:
        (root / name).write_text(text)
        record = {"bytes": len(text), "sha256": sha256(text.encode())}
        edit(root / "model_index.json", lambda index: index["files"].update({name: record}))

    return fault


def flipped(name: str) -> Callable[[Path], None]:
    def fault(root: Path) -> None:
        data = bytearray((root / name).read_bytes())
        data[len(data) // 2] ^= 1
        (root / name).write_bytes(bytes(data))

    return fault


def cut(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:-9])


CONFIG = "expert_001/config.json"
FAULTS: list[tuple[Callable[[Path], Any], type[DDMError], str]] = [
    (lambda root: shutil.rmtree(root), MissingArtifact, r"is not a pipeline: it has no model_index\.json"),
    (lambda root: (root / "model_index.json").unlink(), MissingArtifact, "is not a pipeline"),
    (cut("model_index.json"), CorruptArtifact, r"model_index\.json: not whole"),
    (flipped("model_index.json"), CorruptArtifact, r"model_index\.json: (altered|not whole)"),
    (index(lambda index: index.update(_ddm_ray_version="99.0")), RunError, r"saved by ddm-ray 99\.0.*install that"),
    (lambda root: (root / "model_index.json").write_text("{}"), RunError, "isn't a pipeline of ours: open"),
    (index(lambda index: index.pop("prior_CK")), CorruptArtifact, r"model_index\.json: not as .*prior_CK"),
    (index(lambda index: index.update(router_prior_K=[0.25] * 4)), RunError, "another prior than the data's"),
    (index(lambda index: index.pop("router")), CorruptArtifact, r"model_index\.json: not as .*router"),
    (index(lambda index: index["defaults"].update(steps=0)), CorruptArtifact, r"model_index\.json: not as .*steps"),
    (index(lambda index: index["files"].pop(CONFIG)), CorruptArtifact, rf"says nothing of {CONFIG}"),
    (index(lambda index: index.pop("expert_003")), ExpertCountError, "prior_CK has shape"),
    (index(lambda index: index["class_names"].pop()), SamplingError, "2 class_names for models of 3 classes"),
    (index(lambda index: index.update(image_shape=[1, 16, 16])), SamplingError, "expert 0 is for images of shape"),
    (index(lambda index: index.update(vae=["diffusers", "AutoencoderKL"])), MissingArtifact, "lacks the folder vae"),
    (lambda root: shutil.rmtree(root / "router"), MissingArtifact, r"router/config\.json is missing"),
    (lambda root: (root / "expert_002" / WEIGHTS).unlink(), MissingArtifact, rf"expert_002/{WEIGHTS} is missing"),
    (cut(f"expert_002/{WEIGHTS}"), CorruptArtifact, rf"expert_002/{WEIGHTS}: \d+ bytes of \d+"),
    (flipped(f"router/{WEIGHTS}"), CorruptArtifact, rf"router/{WEIGHTS}: checksum"),
    (flipped(CONFIG), CorruptArtifact, rf"{CONFIG}: checksum"),
    (written(CONFIG, "{"), CorruptArtifact, rf"{CONFIG}: not JSON"),
    (
        written(CONFIG, '{"_class_name": "UNet", "flow": {}, "_ddm_ray_version": "0"}'),
        CorruptArtifact,
        rf"{CONFIG}: .*class 'UNet'",
    ),
    (
        written(CONFIG, '{"_class_name": "DiT", "flow": {"path": "bent"}, "_ddm_ray_version": "0"}'),
        CorruptArtifact,
        rf"{CONFIG}: .*unknown path 'bent'",
    ),
    (
        lambda root: written(CONFIG, (root / CONFIG).read_text().replace('"heads": 2', '"heads": 0'))(root),
        CorruptArtifact,
        rf"{CONFIG}: .*config of DiT doesn't build one",
    ),
]


@pytest.mark.parametrize(("fault", "kind", "message"), FAULTS)
def test_what_is_wrong_is_said_in_one_line(
    saved: Path, tmp_path: Path, fault: Callable[[Path], Any], kind: type[DDMError], message: str
) -> None:
    root = shutil.copytree(saved, tmp_path / "pipeline")
    fault(root)
    with pytest.raises(kind, match=message) as raised:
        DDMPipeline.from_pretrained(root)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("named", [["transformers", "AutoTokenizer"], ["transformers", 3], "CLIPTokenizer"])
def test_a_component_of_another_class_is_refused(tmp_path: Path, named: object) -> None:
    texts(tmp_path / "tokenizer").save_pretrained(tmp_path / "saved")
    edit(tmp_path / "saved/model_index.json", lambda index: index.update(tokenizer=named))
    with pytest.raises(
        CorruptArtifact, match=r"model_index\.json: tokenizer is .*; of transformers, use one of CLIPTok"
    ):
        DDMPipeline.from_pretrained(tmp_path / "saved")


def test_an_altered_file_of_another_librarys_is_named(tmp_path: Path) -> None:
    name = "text_encoder/model.safetensors"
    texts(tmp_path / "tokenizer").save_pretrained(tmp_path / "saved")
    flipped(name)(tmp_path / "saved")
    with pytest.raises(CorruptArtifact, match=f"saved/{name}: size or checksum differs"):
        DDMPipeline.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda before: {"experts": before.experts[:3]}, ExpertCountError, "3 experts for a mixture of 4"),
        (
            lambda before: {
                "router": random(
                    Router,
                    0,
                    num_experts=3,
                    image_size=8,
                    channels=1,
                    num_classes=3,
                    patch_size=4,
                    width=16,
                    depth=1,
                    heads=2,
                )
            },
            ExpertCountError,
            "the router speaks of 3 experts, the mixture has 4",
        ),
        (
            lambda before: {"experts": (*before.experts[:3], models("texts").experts[0])},
            SamplingError,
            r"expert 3 is for images of shape \(4, 8, 8\), the mixture for \(1, 8, 8\)",
        ),
        (
            lambda before: {"info": replace(before.info, num_classes=2, prior_CK=before.info.prior_CK[:3])},
            SamplingError,
            "expert 0 knows 3 classes, the mixture 2",
        ),
        (
            lambda before: {"info": replace(before.info, num_classes=None, prior_CK=before.info.prior_CK[:1])},
            SamplingError,
            "expert 0 is conditioned on classes, the mixture on texts",
        ),
    ],
)
def test_models_that_do_not_fit_each_other_are_refused(
    change: Callable[[Models], dict[str, Any]], kind: type[DDMError], message: str
) -> None:
    before = models()
    with pytest.raises(kind, match=message) as raised:
        DDMPipeline(replace(before, **change(before)))
    assert type(raised.value) is kind
