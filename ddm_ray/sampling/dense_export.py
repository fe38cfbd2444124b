"""One dense model as a folder that diffusers alone opens: weights, components, and the files of ours that run them."""

import ast
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import ddm_ray
from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import VelocityField
from ddm_ray.errors import ConfigError, SamplingError
from ddm_ray.models import weights
from ddm_ray.sampling.components import INDEX, Components, bare, config_of
from ddm_ray.sampling.pretrained import write_folder

PIPELINE, TRANSFORMER = "ddm_ray.sampling.dense_pipeline", "ddm_ray.models.dense_transformer"
CARD = "README.md"


def save_dense(components: Components, card: str, folder: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Write a dense model and its card, whole or not at all, as `pretrained.write_folder` does.

    `DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)` opens it. ConfigError
    without diffusers; SamplingError for a mixture, for a model without its config and for a folder with other things.
    """
    models = components.models
    if len(models.experts) != 1:
        raise SamplingError(f"{len(models.experts)} experts are no dense model: name the student or the monolith")
    try:
        from ddm_ray.models.dense_transformer import DenseTransformer
        from ddm_ray.sampling.dense_pipeline import DensePipeline
    except ImportError:
        raise ConfigError("an ordinary pipeline needs diffusers: pip install 'ddm-ray[diffusers]'") from None
    model, info = models.experts[0], models.info
    network, config = bare(model), config_of(model)
    if config is None:
        raise SamplingError("the model can't be saved: it doesn't keep its config")
    flow = asdict(model.flow if isinstance(model, VelocityField) else Flow())
    transformer = DenseTransformer(weights.describe(network)["class"], config, flow, info.image_shape)
    bare(transformer.field).load_state_dict(network.state_dict())
    encoder, latents, defaults = components.text_encoder, components.latents, components.defaults
    pooled = encoder.pooled if encoder else None
    pipeline = DensePipeline(
        transformer,
        encoder and encoder.model,
        encoder and encoder.tokenizer,
        pooled and pooled.model,
        pooled and pooled.tokenizer,
        latents and latents.autoencoder,
        num_classes=info.num_classes,
        class_names=list(components.class_names),
        knows_null=info.trained_null or info.num_classes == 0,
        text_tokens=encoder.tokens if encoder else None,
        text_tokens_2=pooled.tokens if pooled else None,
        latent_scale=latents.scale if latents else 1.0,
        latent_shift=latents.shift if latents else 0.0,
        solver=defaults.solver,
        times=defaults.times,
        steps=defaults.steps,
        guidance_scale=defaults.guidance_scale,
        guidance_interval=list(defaults.guidance_interval),
    )

    def write(being: Path) -> None:
        pipeline.save_pretrained(being)
        index = json.loads((being / INDEX).read_text())
        index["_class_name"] = ["pipeline", DensePipeline.__name__]
        index["_ddm_ray_version"] = ddm_ray.__version__
        index["transformer"] = [_file_name(TRANSFORMER), DenseTransformer.__name__]
        (being / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        _copy(PIPELINE, being, "pipeline")
        _copy(TRANSFORMER, being / "transformer", _file_name(TRANSFORMER))
        (being / CARD).write_text(card)

    write_folder(folder, overwrite, write)


def _copy(module: str, folder: Path, name: str) -> None:
    """Copies a module of ours and all that it imports of ours, as files that import each other from their folder."""
    reached = [module]
    for each in reached:
        reached += sorted(set(_imports(each)) - {*reached})
    for each in reached[1:]:
        (folder / f"{_file_name(each)}.py").write_text(_beside(each))
    # Diffusers brings along what the first file itself imports, and nothing that this imports in turn.
    named = "".join(f"from .{_file_name(each)} import __name__ as _  # noqa: E402, F401\n" for each in reached[1:])
    (folder / f"{name}.py").write_text(f"{_beside(module)}\n{named}")


def _beside(module: str) -> str:
    """The module's source, whose imports of ours are from files beside it."""
    return re.sub(
        r"^from (ddm_ray(?:\.\w+)+) import", lambda m: f"from .{_file_name(m[1])} import", _source(module), flags=re.M
    )


def _imports(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ddm_ray."):
            yield node.module


def _source(module: str) -> str:
    return (Path(ddm_ray.__file__).parent / f"{module.removeprefix('ddm_ray.').replace('.', '/')}.py").read_text()


def _file_name(module: str) -> str:
    """A name that no other pipeline's file has: diffusers keeps the files of all of them in one folder."""
    return module.replace(".", "_")
