"""The models of the paper's recipes, built without memory: shapes, names, counts, bytes."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ddm_ray.config import DataConfig, RunConfig, TrainConfig, load_recipe, recipe_names
from ddm_ray.core.condition import Condition, Text
from ddm_ray.models import weights
from ddm_ray.models.flops import num_parameters, training_flops_per_row
from ddm_ray.models.spec import denoiser_spec, router_spec

pytestmark = pytest.mark.contract

PAPERS = ("imagenet256-k8", "laion256-k8", "ddm-24b")


@dataclass(frozen=True)
class Counts:
    """Parameters that we count, and what was published for the same network."""

    expert: int
    router: int
    published_expert: float
    published_router: float


COUNTS = {
    "imagenet256-k8": Counts(674_816_272, 130_298_120, 675e6, 130e6),
    "laion256-k8": Counts(824_641_936, 159_058_952, 895e6, 158e6),
    "ddm-24b": Counts(2_984_153_616, 160_041_992, 3e9, 158e6),
}


def built(name: str) -> tuple[RunConfig, nn.Module, nn.Module]:
    """The recipe, its expert and its router, on the meta device."""
    config = load_recipe(name)
    return config, weights.build(denoiser_spec(config), "meta"), weights.build(router_spec(config), "meta")


def rows(data: DataConfig, num_rows: int = 2) -> tuple[Tensor, Tensor, Condition]:
    """Arguments of a network for so many rows of the run's data, on the meta device."""
    with torch.device("meta"):
        condition: Condition
        if data.text is None:
            condition = torch.zeros(num_rows, dtype=torch.int64)
        else:
            text, pooled = data.text, data.text.pooled_dim
            condition = Text(
                torch.zeros(num_rows, text.tokens, text.dim),
                torch.ones(num_rows, text.tokens, dtype=torch.bool),
                None if pooled is None else torch.zeros(num_rows, pooled),
            )
        return torch.zeros(num_rows, *data.shape), torch.zeros(num_rows), condition


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipes_networks_map_its_images(name: str) -> None:
    config, expert, router = built(name)
    x_BCHW, t_B, condition = rows(config.data)
    assert expert(x_BCHW, t_B, condition).shape == x_BCHW.shape
    assert router(x_BCHW, t_B, condition).shape == (2, config.partition.num_clusters)
    assert {tensor.device.type for model in (expert, router) for tensor in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", PAPERS)
def test_parameters_are_counted(name: str) -> None:
    _, expert, router = built(name)
    assert (num_parameters(expert), num_parameters(router)) == (COUNTS[name].expert, COUNTS[name].router)


@pytest.mark.parametrize("name", ["imagenet256-k8", "laion256-k8"])
def test_the_router_adds_the_papers_share_of_flops(name: str) -> None:
    """4 % of the experts' (paper, section 4)."""
    config, expert, router = built(name)
    tokens = 0 if config.data.text is None else config.data.text.tokens

    def flops(network: nn.Module, train: TrainConfig) -> int:
        return train.steps * train.batch * training_flops_per_row(network, config.data.shape, tokens)

    assert flops(router, config.router.train) / flops(expert, config.monolith.train) == pytest.approx(0.04, abs=0.002)


@pytest.mark.parametrize(
    ("name", "expert_error", "router_error"),
    [
        ("imagenet256-k8", 0.001, 0.003),
        # The published text-conditioned expert has 70M more than DiT-XL/2 with cross-attention comes to, and the paper
        # doesn't say where. Its router is near ours.
        ("laion256-k8", 0.079, 0.007),
        # The published size is rounded, and its router's isn't told for this run: T5-XL's channels are wider than
        # CLIP's, by (2048 - 768) * 768 weights.
        ("ddm-24b", 0.006, 0.013),
    ],
)
def test_counts_are_as_near_to_the_published_as_can_be_explained(
    name: str, expert_error: float, router_error: float
) -> None:
    counts = COUNTS[name]
    assert counts.expert / counts.published_expert == pytest.approx(1, abs=expert_error)
    assert counts.router / counts.published_router == pytest.approx(1, abs=router_error)


def test_what_sets_the_recipes_networks_apart() -> None:
    """Every difference between the recipes' counts by arithmetic, so that none is an accident."""
    width, blocks, text, hidden = 1152, 28, 768, 1152
    linear = lambda inputs, outputs: (inputs + 1) * outputs  # noqa: E731
    cross = linear(width, width) + linear(width, 2 * width) + linear(width, width)
    projection = linear(text, hidden) + linear(hidden, width)
    labels = 1001 * width
    imagenet, laion = COUNTS["imagenet256-k8"], COUNTS["laion256-k8"]
    assert laion.expert == imagenet.expert - labels + projection + blocks * cross
    assert COUNTS["ddm-24b"].router == laion.router + (2048 - text) * 768
    # DiT-XL/2 as published counts its table of positions and predicts a variance as well.
    assert imagenet.expert + 256 * width + linear(width, 2 * 2 * 4) == 675_129_632


def test_a_spec_names_the_flow_that_is_not_the_usual() -> None:
    usual = load_recipe("tiny")
    assert "flow" not in denoiser_spec(usual).keys() | router_spec(usual).keys()
    noise = load_recipe("tiny", ("flow.prediction=noise", "flow.path=ddpm", "expert.model.analytic_skip="))
    for spec in (denoiser_spec(noise), router_spec(noise)):
        assert spec["flow"] == {"path": "ddpm", "prediction": "noise"}
        assert num_parameters(weights.build(spec, "meta")) > 0
    assert denoiser_spec(noise)["config"] == {**denoiser_spec(usual)["config"], "analytic_skip": None}


@pytest.mark.parametrize(
    ("model", "in_channels"),
    [
        ("{name: SD3Transformer2DModel, arguments: {num_layers: 2, pos_embed_max_size: 16}}", 4),
        ("{name: PixArtTransformer2DModel, arguments: {num_layers: 2}}", 4),
        ("{name: PixArtTransformer2DModel, arguments: {num_layers: 2, out_channels: 8}}", 4),
        ("{name: FluxTransformer2DModel, arguments: {num_layers: 1, num_single_layers: 1}}", 16),
    ],
)
def test_what_the_data_decides_is_filled_into_diffusers_arguments(model: str, in_channels: int) -> None:
    config = load_recipe("ddm-24b", (f"expert.model={model}",))
    spec = denoiser_spec(config)
    assert spec["config"]["arguments"]["in_channels"] == in_channels
    expert = weights.build(spec, "meta")
    x_BCHW, t_B, condition = rows(config.data)
    assert expert(x_BCHW, t_B, condition).shape == x_BCHW.shape
