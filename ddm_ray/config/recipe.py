"""Recipes: named RunConfigs that ship with the package, YAML files of one's own, and settings on top."""

from collections.abc import Collection, Sequence
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any

from ddm_ray.config.older import JOBS
from ddm_ray.config.run import RunConfig, parse_config
from ddm_ray.config.yaml_fields import read_setting, read_yaml
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import meant, one_line

CONDITIONS = {"data.class_names", "data.num_classes", "data.text"}
"""Kinds of conditions: a run has one, and a setting of one replaces the others."""

NETWORK = {"embedder.model", "embedder.image_size", "embedder.checkpoint", "embedder.model_args"}
"""Fields that belong to one kind of embedder: a setting of the kind drops the recipe's."""


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package."""
    folder = resources.files("ddm_ray") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """YAML of a recipe that ships with the package. Raises ConfigError for another name."""
    shipped = recipe_names()
    if name not in shipped:
        raise ConfigError(f"recipe {name!r} isn't shipped: there are {', '.join(shipped)}{meant(name, shipped)}")
    return (resources.files("ddm_ray") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def about_recipe(name: str) -> str:
    """The first sentence of a shipped recipe's comment: what it is for, and on which machine."""
    comments = takewhile(lambda line: line.startswith("#"), recipe_text(name).splitlines())
    return one_line(" ".join(line.lstrip("# ") for line in comments)).partition(". ")[0].removesuffix(".") + "."


def load_recipe(recipe: str, settings: Sequence[str] = ()) -> RunConfig:
    """RunConfig of a shipped recipe's name or a YAML file's path, with `a.b=value` settings applied.

    Raises ConfigError for an unknown recipe, unreadable YAML, an unknown key or a value that doesn't fit.
    """
    path = Path(recipe)
    if recipe in recipe_names():
        text: str | bytes = recipe_text(recipe)
    elif path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"recipe {recipe}: no such file")
        text = path.read_bytes()
    else:
        shipped = recipe_names()
        known = f"neither a shipped one ({', '.join(shipped)}) nor a .yaml file{meant(recipe, shipped)}"
        raise ConfigError(f"recipe {recipe!r} is {known}")
    fields = read_yaml(text, f"recipe {recipe}", RunConfig)
    if not isinstance(fields, dict):
        raise ConfigError(f"recipe {recipe}: holds no fields; write one as `name: value` lines")
    apply_settings(fields, settings)
    return parse_config(fields, f"recipe {recipe}" + (f" with {' '.join(settings)}" if settings else ""))


def apply_settings(fields: dict[str, Any], settings: Collection[str]) -> None:
    """Apply `a.b=value` settings to the fields of a configuration. Raises ConfigError."""
    named = {setting.partition("=")[0] for setting in settings}
    for setting in settings:
        _apply(fields, setting)
    if isinstance(fields.get("data"), dict) and named & CONDITIONS:
        for other in CONDITIONS - named:  # the recipe's own conditions make way
            fields["data"].pop(other.removeprefix("data."), None)
    for job in JOBS:
        if f"{job}.train.global_batch" in named and f"{job}.train.batch" not in named:
            fields[job]["train"].pop("batch", None)  # and a batch for its older name
    if isinstance(fields.get("embedder"), dict) and "embedder.kind" in named:
        for name in NETWORK - named:  # so do fields of a network of another kind
            fields["embedder"].pop(name.removeprefix("embedder."), None)


def _apply(fields: dict[str, Any], setting: str) -> None:
    path, equals, value = setting.partition("=")
    *parents, last = path.split(".")
    if not equals or not all([*parents, last]):
        raise ConfigError(f"setting {setting!r}: write it as a.b=value, e.g. expert.train.steps=500")
    here: Any = fields
    for parent in parents:
        here = here.setdefault(parent, {})
        if not isinstance(here, dict):
            raise ConfigError(f"setting {setting!r}: {parent!r} has no fields below it")
    here[last] = read_setting([*parents, last], value, f"setting {setting!r}", RunConfig)
