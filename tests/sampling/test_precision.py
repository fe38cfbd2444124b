"""Networks in bf16 under a state in fp32: near what they sample in fp32, whichever way they are loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import VelocityField
from ddm_ray.errors import SamplingError
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.run import Run
from tests.models.test_diffusers_transformer import NAMES
from tests.models.test_diffusers_transformer import network as of_diffusers
from tests.models.test_diffusers_transformer import rows as diffusers_rows
from tests.models.test_text_condition import CLASSES, TEXT, condition, inputs, perturbed
from tests.random_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("precision") / "run"), num_rows=40)


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision") / "exported"
    DDMPipeline.from_run(run).save_pretrained(folder)
    return folder


def images(pipeline: DDMPipeline) -> Tensor:
    made = pipeline(class_labels=[3, 4, 5], seeds=0, strategy="full", guidance_scale=2.0, output_type="latent").images
    assert isinstance(made, Tensor)
    return made


def off(actual: Tensor, right: Tensor) -> float:
    """Root mean square of the difference, in that of what is right."""
    assert actual.dtype == right.dtype == torch.float32
    actual, right = actual.detach(), right.detach()
    return float((actual - right).square().mean().sqrt() / right.square().mean().sqrt())


@pytest.mark.parametrize("offload", [None, "host", "disk"])
@pytest.mark.parametrize("exported", [False, True])
def test_images_of_bf16_are_near_those_of_fp32(run: Run, folder: Path, exported: bool, offload: str) -> None:
    load: Callable[..., DDMPipeline] = DDMPipeline.from_pretrained if exported else DDMPipeline.from_run
    pipeline = load(folder if exported else run, offload=offload, dtype="bf16")
    assert 0 < off(images(pipeline), images(DDMPipeline.from_run(run))) < 0.02
    if offload is None:
        dtypes = {tensor.dtype for network in pipeline.models.experts for tensor in network.state_dict().values()}
        assert dtypes == {torch.bfloat16}


def test_another_precision_is_told(run: Run, folder: Path) -> None:
    for load, where in ((DDMPipeline.from_run, run), (DDMPipeline.from_pretrained, folder)):
        with pytest.raises(SamplingError, match=r"unknown precision 'fp8': use one of fp32 \(torch\.float32\), bf16"):
            load(where, dtype="fp8")


@pytest.mark.parametrize("kind", [CLASSES, TEXT], ids=["labels", "texts"])
@pytest.mark.parametrize("flow", [Flow(), Flow("cosine", "score"), Flow("ddpm", "noise")], ids=str)
def test_a_state_in_fp32_meets_weights_in_bf16(kind: dict, flow: Flow) -> None:
    model, rows = perturbed(analytic_skip=0.5, **kind), (*inputs(), condition(kind))
    right = VelocityField(model, flow)(*rows)
    assert 0 < off(VelocityField(model.bfloat16(), flow)(*rows), right) < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_so_do_transformers_of_diffusers(name: str) -> None:
    model = of_diffusers(name)
    right = model(*diffusers_rows())
    assert 0 < off(model.bfloat16()(*diffusers_rows()).float(), right) < 0.1
