"""Text encoders that trainings load beside their own networks: the memory that they take."""

from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.islands.needs import ModelNeeds, needs_of
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.text import TextEncoder
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from tests.sampling import tiny_components


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    """A folder with a text encoder."""
    tiny_components.text_model().save_pretrained(tmp_path / "clip")
    tiny_components.tokenizer(tmp_path / "clip").save_pretrained(tmp_path / "clip")
    return str(tmp_path / "clip")


def begun(place: Path, encoder: str, stored: str = "ids", pooled: str = "null") -> Run:
    dim = tiny_components.TEXT_DIM
    text = f"{{encoder: {encoder}, tokens: 6, dim: {dim}, pooled_dim: {dim}, pooled_encoder: {pooled}}}"
    settings = (
        f"data.text={text}",
        f"data.text.stored={stored}",
        "data.latents=null",
        "data.channels=3",
        "evaluate.clip=null",
    )
    return Run.create(str(place), load_recipe("laion256-k8", settings))


def need_of(run: Run) -> ModelNeeds:
    (need,) = needs_of(run, [expert(0)])
    return need


@pytest.mark.parametrize("number", [1, 2])
def test_a_workers_memory_has_the_encoders_that_it_holds(tmp_path: Path, encoder: str, number: int) -> None:
    """At 4 bytes a parameter on a CPU, and 2 on a GPU; with ZeRO too each worker has all of them."""
    pooled = encoder if number == 2 else "null"
    ids, features = (need_of(begun(tmp_path / stored, encoder, stored, pooled)) for stored in ("ids", "features"))
    held = number * num_parameters(TextEncoder.from_pretrained(encoder, 6).model)
    assert ids.text_parameters == held > 0 == features.text_parameters
    for use_gpu, size in ((False, 4), (True, 2)):
        alone = features.memory(4, use_gpu)
        assert ids.memory(4, use_gpu) == [one and one + size * held for one in alone]


def test_an_encoder_that_is_not_here_has_no_known_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert need_of(begun(tmp_path / "run", "a/clip")).text_parameters is None
