"""Adapters are trained as whole networks are: at any ZeRO stage, interrupted to the same bits, and nothing else is."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from ddm_ray.config import SamplingSettings
from ddm_ray.core.snr import bare
from ddm_ray.errors import ConfigError, Preempted
from ddm_ray.jobs.copying import copy
from ddm_ray.jobs.published import Weights
from ddm_ray.models.flops import num_parameters
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, ROUTER, expert
from ddm_ray.run.run import Run
from ddm_ray.sampling.card import model_card
from ddm_ray.sampling.dense_export import dense_pipeline
from ddm_ray.sampling.initial_weights import create_run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_models, load_network
from ddm_ray.sampling.shared_base import SharedBase
from ddm_ray.train import worker
from tests.random_run import make_data, make_run
from tests.train.conftest import SHORT
from tests.train.results import weights_of

pytestmark = pytest.mark.contract

EXPERT = expert(1)
ADAPTER = ("expert.adapter.rank=2", "expert.train.learning_rate=1e-2", *SHORT)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("base") / "source"), num_rows=60)


def make(folder: Path, source: Run, *settings: str) -> Run:
    init = f"expert.train.init_from={{source: {source.url}, network: monolith}}"
    run = make_data(str(folder), settings=(init, *ADAPTER, *settings))
    return create_run(run.url, run.config)[0]


@pytest.fixture(scope="module")
def trained(world_of_one: None, source: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Both experts trained without an interruption. Only to be read."""
    run = make(tmp_path_factory.mktemp("adapters") / "run", source)
    for artifact in (*run.experts, ROUTER):
        worker.train(run.url, artifact, TrainPlacement())
    return run


def test_what_is_trained_and_kept_is_the_adapter_alone(trained: Run, source: Run) -> None:
    own = weights_of(trained, EXPERT)
    assert own and all(".lora_A." in name or ".lora_B." in name for name in own)
    assert any(tensor.abs().max() > 0 for name, tensor in own.items() if "lora_B" in name)
    states = {key: size for key, size in trained.store.sizes(str(EXPERT)).items() if "/state/" in key}
    values = [load(trained.store.read(f"{EXPERT}/{key}")) for key in states if "/value-" in key]
    names = {piece.partition("@")[0] for part in values for piece in part}
    assert names == {*own}
    network = load_network(trained, Weights.finished(trained, EXPERT)).state_dict()
    for name, tensor in load_network(source, Weights.finished(source, MONOLITH)).state_dict().items():
        layer, _, last = name.rpartition(".")
        assert torch.equal(tensor, network.get(name, network.get(f"{layer}.base_layer.{last}")))


def test_interrupted_it_ends_with_the_same_bits(trained: Run, source: Run, tmp_path: Path) -> None:
    run = make(tmp_path / "run", source)
    steps = count(1)
    with pytest.raises(Preempted):
        worker.train(run.url, EXPERT, TrainPlacement(), notice=lambda: next(steps) == 5)
    worker.train(run.url, EXPERT, TrainPlacement())
    own, theirs = weights_of(run, EXPERT), weights_of(trained, EXPERT)
    assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_zero_stages_train_it_alike(trained: Run, source: Run, tmp_path: Path, zero_stage: int) -> None:
    run = make(tmp_path / "run", source)
    worker.train(run.url, EXPERT, TrainPlacement(zero_stage=zero_stage))
    theirs = weights_of(trained, EXPERT)
    for name, tensor in weights_of(run, EXPERT).items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-4)


def test_a_base_in_bf16_and_checkpointed_activations(world_of_one: None, source: Run, tmp_path: Path) -> None:
    run = make(tmp_path / "run", source, "expert.train.precision=bf16")
    worker.train(run.url, EXPERT, TrainPlacement(activation_checkpointing=True))
    own = weights_of(run, EXPERT)
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in own.values())
    assert any(tensor.abs().max() > 0 for name, tensor in own.items() if "lora_B" in name)


@pytest.mark.parametrize("strategy", ["once", "top-1", "full"])
def test_a_mixture_samples_as_its_networks_do_one_by_one(trained: Run, tmp_path: Path, strategy: str) -> None:
    models = load_models(trained)
    assert isinstance(models.experts, SharedBase)
    alone = [load_network(trained, Weights.finished(trained, each)) for each in trained.experts]
    request = SampleRequest(tuple(range(6)), torch.arange(6), SamplingSettings(strategy=strategy, steps=4))
    expected = replace(models, experts=alone).sample(request).images_BCHW
    torch.testing.assert_close(models.sample(request).images_BCHW, expected, atol=1e-5, rtol=1e-5)
    assert (expected - models.sample(replace(request, seeds=(7,) * 6)).images_BCHW).abs().max() > 0.1


def test_an_export_has_the_base_once_and_paints_the_same(trained: Run, tmp_path: Path) -> None:
    pipeline = DDMPipeline.from_run(trained)
    pipeline.save_pretrained(tmp_path / "export")
    again = DDMPipeline.from_pretrained(str(tmp_path / "export"))
    asked = {"class_labels": [3, 7], "steps": 3, "seeds": 5, "output_type": "np"}
    images = [each(**asked).images for each in (pipeline, again)]
    assert (images[0] == images[1]).all() and images[0].std() > 0.1
    dense = DDMPipeline.from_run(trained, offload="disk")
    dense.save_pretrained(tmp_path / "offloaded")
    assert (DDMPipeline.from_pretrained(str(tmp_path / "offloaded"), offload="disk")(**asked).images == images[0]).all()
    sizes = {each.parent.name: each.stat().st_size for each in (tmp_path / "export").rglob("*.safetensors")}
    assert sizes["base"] > 2 * sizes["expert_000"] == 2 * sizes["expert_001"]


def test_a_dense_export_has_the_adapter_merged(trained: Run) -> None:
    worker.train(trained.url, MONOLITH, TrainPlacement())
    pipeline = DDMPipeline.from_run(trained, model="monolith")
    network = pipeline.models.experts[0]
    merged = bare(dense_pipeline(pipeline.components).transformer.field)
    given = torch.randn(3, 1, 8, 8), torch.rand(3), torch.arange(3)
    with torch.no_grad():
        torch.testing.assert_close(merged(*given), network(*given), atol=1e-5, rtol=1e-5)
        assert (merged(*given) - network.base(*given)).abs().max() > 1e-3
    card = model_card(trained, "monolith")
    assert f"| parameters | {num_parameters(network.base):,} |" in card and "merged into the network of" in card


def test_host_memory_and_copies_have_what_they_need(trained: Run, tmp_path: Path) -> None:
    asked = {"class_labels": [3, 7], "steps": 3, "seeds": 5, "output_type": "np"}
    images = [DDMPipeline.from_run(trained, offload=offload)(**asked).images for offload in (None, "host")]
    assert np.abs(images[0] - images[1]).max() < 1e-5
    copy(trained, str(tmp_path / "copy"), EXPERT, lambda share, key: None)
    copied = Run.open(str(tmp_path / "copy"))
    assert load_network(copied, Weights.finished(copied, EXPERT)).base is not None


def test_beginning_with_another_runs_adapter_names_the_remedy(trained: Run, tmp_path: Path) -> None:
    init = f"expert.train.init_from={{source: {trained.url}, network: expert 1}}"
    run = make_data(str(tmp_path / "run"), settings=(init, *SHORT))
    with pytest.raises(ConfigError, match=r"experts/001 is an adapter, .*export that run's monolith"):
        create_run(str(tmp_path / "other"), run.config)
