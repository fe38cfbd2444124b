"""RunConfig: what a run IS. Frozen, typed, fingerprinted; where it runs is `placement.py`."""

from ddm_ray.config.data import DataConfig, EmbedderConfig, LatentsConfig, PartitionConfig, TextConfig
from ddm_ray.config.networks import (
    SIZES,
    DenoiserConfig,
    DenoiserJob,
    DiffusersConfig,
    FlowConfig,
    ModelConfig,
    RouterJob,
    TrainConfig,
)
from ddm_ray.config.part import Part
from ddm_ray.config.recipe import load_recipe, read_yaml, recipe_names
from ddm_ray.config.run import RunConfig, one_line, parse_config
from ddm_ray.config.sampling import EvaluateConfig, SampleConfig, strategy_problem

__all__ = [
    "SIZES",
    "DataConfig",
    "DenoiserConfig",
    "DenoiserJob",
    "DiffusersConfig",
    "EmbedderConfig",
    "EvaluateConfig",
    "FlowConfig",
    "LatentsConfig",
    "ModelConfig",
    "Part",
    "PartitionConfig",
    "RouterJob",
    "RunConfig",
    "SampleConfig",
    "TextConfig",
    "TrainConfig",
    "load_recipe",
    "one_line",
    "parse_config",
    "read_yaml",
    "recipe_names",
    "strategy_problem",
]
