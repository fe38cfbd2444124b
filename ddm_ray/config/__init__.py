"""RunConfig: what a run IS. Frozen, typed, fingerprinted; where it runs is `placement.py`."""

from ddm_ray.config.data import DataConfig, EmbedderConfig, LatentsConfig, PartitionConfig, TextConfig
from ddm_ray.config.networks import (
    SIZES,
    DenoiserConfig,
    DiffusersConfig,
    FlowConfig,
    ModelConfig,
    NetworkConfig,
    Precision,
)
from ddm_ray.config.recipe import about_recipe, load_recipe, recipe_names, recipe_text
from ddm_ray.config.run import RunConfig, invalid_fields, parse_config
from ddm_ray.config.sampling import EvaluateConfig, SamplingSettings
from ddm_ray.config.strict_model import StrictModel
from ddm_ray.config.training import DenoiserJob, InitFrom, RouterJob, StudentJob, TrainConfig
from ddm_ray.config.yaml_fields import read_yaml

__all__ = [
    "SIZES",
    "DataConfig",
    "DenoiserConfig",
    "DenoiserJob",
    "DiffusersConfig",
    "EmbedderConfig",
    "EvaluateConfig",
    "FlowConfig",
    "InitFrom",
    "LatentsConfig",
    "ModelConfig",
    "NetworkConfig",
    "PartitionConfig",
    "Precision",
    "RouterJob",
    "RunConfig",
    "SamplingSettings",
    "StrictModel",
    "StudentJob",
    "TextConfig",
    "TrainConfig",
    "about_recipe",
    "invalid_fields",
    "load_recipe",
    "parse_config",
    "read_yaml",
    "recipe_names",
    "recipe_text",
]
