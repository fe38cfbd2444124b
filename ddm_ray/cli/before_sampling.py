"""Checks before a network is loaded to sample with. They import no torch, which takes seconds."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddm_ray.config import SamplingSettings, invalid_fields
from ddm_ray.errors import ConfigError
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.sampling.export_folder import INDEX
from ddm_ray.sampling.labels import class_number

MAX_IMAGES, MAX_SEED = 100_000, 2**53 - 1
"""Images that one command samples, which lie in memory; and the last seed that all programs read exactly."""


def sampled_run(url: str, model: str) -> Run | None:
    """The run at a URL, in which the mixture or the other model is finished; None for a folder that was exported."""
    if (Path(url) / INDEX).is_file():
        if model != "mixture":
            raise ConfigError(f"--model {model}: {url} is exported, and holds what it holds; leave it out")
        return None
    run = Run.open(url)
    for artifact in run.experts if model == "mixture" else [Artifact(model)]:
        run.require(artifact)
    return run


def require_settings(settings: dict[str, Any]) -> None:
    """Raise ConfigError for settings that can't be."""
    try:
        SamplingSettings().changed(**{name: value for name, value in settings.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(invalid_fields(error, SamplingSettings)) from None


def conditions_of(
    url: str, num_classes: int | None, known: tuple[str, ...], classes: tuple[str, ...], prompts: tuple[str, ...]
) -> tuple[list[str], list[Any]]:
    """The name of each row of images, and its condition for a pipeline: a text or a label.

    `num_classes`: None for models that take texts. `known`: names of their classes. Raises ConfigError, and
    SamplingError for an unknown class.
    """
    if num_classes is None:
        if classes:
            raise ConfigError(f"--class: {url} is conditioned on texts; use --prompt")
        if not prompts:
            raise ConfigError(f"{url} is conditioned on texts: say what to paint with --prompt")
        return list(prompts), list(prompts)
    if num_classes == 0:
        if classes or prompts:
            raise ConfigError(f"{url} has neither classes nor texts: leave out --class and --prompt")
        return ["any"], [None]
    names = list(prompts or classes or known)
    if not names:
        raise ConfigError(f"{url} has classes without names: say which with --class, from 0 to {num_classes - 1}")
    # On a command line a number is a text, too. A class of that name comes first.
    labels = [int(name) if name.isdecimal() and name not in known else name for name in names]
    for label in labels:
        class_number(label, known, num_classes)
    named = [known[label] if isinstance(label, int) and label < len(known) else str(label) for label in labels]
    return named, labels


def counts_of(num_rows: int, num: int | None, per_class: int) -> list[int]:
    """The number of images of each class or prompt, as far as there are any: `num` in all, or `per_class` of each.

    Raises ConfigError for more than MAX_IMAGES.
    """
    if num is None:
        if per_class * num_rows > MAX_IMAGES:
            raise ConfigError(f"{per_class} images of each of {num_rows}: use more commands, of {MAX_IMAGES:,} at most")
        return [per_class] * num_rows
    each, more = divmod(num, num_rows)
    return [each + 1] * more + [each] * (num_rows - more if each else 0)
