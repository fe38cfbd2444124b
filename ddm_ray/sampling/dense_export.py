"""One dense model as a folder that diffusers alone opens: weights, components, and two files of code that run them."""

import json
import os
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import ddm_ray
from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import VelocityField, bare
from ddm_ray.errors import ConfigError, SamplingError
from ddm_ray.models import weights
from ddm_ray.models.adapters import is_adapted, merged_state
from ddm_ray.sampling.components import Components, config_of
from ddm_ray.sampling.export_folder import CARD, INDEX, records_below, write_folder
from ddm_ray.sampling.single_file import single_file

PIPELINE, TRANSFORMER = "ddm_ray.sampling.dense_pipeline", "ddm_ray.models.dense_transformer"


def save_dense(components: Components, card: str, folder: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Write a dense model and its card, whole or not at all, as `export_folder.write_folder` does.

    `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` opens it, or, in the folder's place, the name of
    a repository on a hub that has its files. Raises as `dense_pipeline`, and SamplingError for a folder with other
    things.
    """
    pipeline = dense_pipeline(components)
    network = type(bare(pipeline.transformer.field)).__module__

    def write(being: Path) -> None:
        pipeline.save_pretrained(being)
        index = json.loads((being / INDEX).read_text())
        index["_class_name"] = [_write_code(PIPELINE, being), type(pipeline).__name__]
        index["_ddm_ray_version"] = ddm_ray.__version__
        code = _write_code(TRANSFORMER, being / "transformer", network)
        index["transformer"] = [code, type(pipeline.transformer).__name__]
        (being / CARD).write_text(card)
        index["_ddm_ray_files"] = records_below(being)  # diffusers takes no name that begins so for a component
        (being / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    write_folder(folder, overwrite, write)


def dense_pipeline(components: Components) -> Any:
    """DensePipeline of a dense model, of other libraries' own components.

    ConfigError without diffusers; SamplingError for a mixture and for a model without its config.
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
    transformer = DenseTransformer(weights.spec_of_model(network)["class"], config, flow, info.image_shape)
    bare(transformer.field).load_state_dict(merged_state(network) if is_adapted(network) else network.state_dict())
    encoder, latents, defaults = components.text_encoder, components.latents, components.defaults
    pooled = encoder.pooled if encoder else None
    return DensePipeline(
        transformer,
        encoder and encoder.model,
        encoder and encoder.tokenizer,
        pooled and pooled.model,
        pooled and pooled.tokenizer,
        latents and latents.autoencoder,
        num_classes=info.num_classes,
        id2label={str(label): name for label, name in enumerate(components.class_names)},
        knows_null=info.trained_null or info.num_classes == 0,
        text_tokens=encoder.tokens if encoder else None,
        text_tokens_2=pooled.tokens if pooled else None,
        latent_scale=latents.scale if latents else 1.0,
        latent_shift=latents.shift if latents else 0.0,
        solver=defaults.solver,
        times=defaults.times,
        steps=defaults.steps,
        guidance_scale=defaults.guidance_scale,
        guidance_low=defaults.guidance_interval[0],
        guidance_high=defaults.guidance_interval[1],
    )


def _write_code(module: str, folder: Path, *others: str) -> str:
    """The name of a file of the module, and of others, written to `folder`, that no other content has.

    Diffusers imports all code of all pipelines from one folder, by the files' names.
    """
    code = single_file(module, *others)
    name = f"{module.rpartition('.')[2]}_{sha256(code.encode()).hexdigest()[:16]}"
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return name
