"""A pipeline as a folder in diffusers' layout: model_index.json, one folder a component, safetensors; no pickle.

Shapes: K experts, C conditions.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from ddm_ray import __version__
from ddm_ray.config import SamplingSettings
from ddm_ray.config.adapters import AdapterConfig
from ddm_ray.core.condition import Text
from ddm_ray.core.flow import Flow
from ddm_ray.core.snr import MatchedRouter, VelocityField, bare
from ddm_ray.errors import ConfigError, CorruptArtifact, MissingArtifact, RunError, SamplingError
from ddm_ray.models import null_text, weights
from ddm_ray.models.latents import Latents
from ddm_ray.models.network import Network
from ddm_ray.models.null_text import NULL_TEXT
from ddm_ray.models.text import TextEncoder
from ddm_ray.models.third_party import MAX_BYTES, brief, parse_json, require_size
from ddm_ray.run.manifest import FileName, FileRecord
from ddm_ray.sampling.components import (
    CONFIG,
    Components,
    config_of,
    latents_of,
    require_fit,
    require_modest,
    text_encoder_of,
)
from ddm_ray.sampling.export_folder import INDEX, UNFINISHED, is_ours, records_below, write_folder
from ddm_ray.sampling.offload import Offload, resident_experts
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import Models, OnLoaded, SamplingPrecision, dtype_of, matched
from ddm_ray.sampling.shared_base import sharing
from ddm_ray.sampling.verified import REMEDY, VerifiedFolder
from ddm_ray.spelling import printable
from ddm_ray.store.checksummed import seal, unseal

WEIGHTS = "diffusion_pytorch_model.safetensors"
BASE = "base"
"""Folder of the network that experts are adapters of."""
ABSENT = [None, None]
_FILES = TypeAdapter(dict[FileName, FileRecord])


def save(
    components: Components,
    folder: str | os.PathLike[str],
    overwrite: bool = False,
    on_written: Callable[[int, int], object] = lambda written, total: None,
) -> None:
    """Write a pipeline in our layout, as `export_folder.write_folder` does. SamplingError and StorageError as there.

    `on_written` is called after each expert, with the number of written ones and the number of all.
    """

    def write(being: Path) -> None:
        written = _write(components, being, on_written)
        index = {"_class_name": "DDMPipeline", "_ddm_ray_version": __version__, **written}
        index["files"] = records_below(being)
        (being / INDEX).write_bytes(seal(index, indent=1))

    write_folder(folder, overwrite, write)


def load_components(
    folder: str | os.PathLike[str],
    device: str = "cpu",
    offload: Offload | None = None,
    precision: SamplingPrecision = "fp32",
    on_loaded: OnLoaded | None = None,
) -> Components:
    """A pipeline that `save` wrote, sizes and checksums verified; experts offloaded to disk as they are fetched.

    Raises MissingArtifact for files that aren't there, RunError for a pipeline of a newer version, and CorruptArtifact,
    which names the file.
    """
    root, dtype = Path(folder), dtype_of(precision)
    index = _index(root)
    try:
        saved = VerifiedFolder(root, _FILES.validate_python(index["files"]))
        names = sorted((name for name in index if name.startswith("expert_")), key=lambda name: (len(name), name))
        present = [index[name] != ABSENT for name in names]
        has_router = index["router"] != ABSENT
        info = _info(index, tuple(int(name.removeprefix("expert_")) for name in names))
        # Folders written before have the router's temperature beside the defaults.
        defaults = SamplingSettings(**{"router_temperature": index.get("router_temperature", 1.0), **index["defaults"]})
        class_names = tuple(index["class_names"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptArtifact(f"{root / INDEX}: not as save_pretrained writes it ({brief(error)})") from None
    specs = [_spec(saved, name) if here else None for name, here in zip(names, present, strict=True)]
    router_spec = _spec(saved, "router") if has_router else None
    require_fit(info, [spec and spec["config"] for spec in specs], router_spec and router_spec["config"])

    def fetch(expert: int, where: str) -> nn.Module:
        spec = specs[expert]
        assert spec is not None
        network = _network(saved, names[expert], spec, base).to(where, dtype)
        if on_loaded and offload is None:
            on_loaded(sum(present[: expert + 1]), sum(present) + has_router)
        return network

    base = None
    if BASE in index:
        base = bare(_network(saved, BASE, _spec(saved, BASE)))
        base.to("cpu" if offload == "host" else device, dtype)
    experts = resident_experts(fetch, present, offload, device, dtype)
    router = _network(saved, "router", router_spec).to(device, dtype) if router_spec else None
    shared = experts if offload else sharing(experts)
    models = Models(replace(info, null_text=_null_text(saved)), shared, router, device)
    encoder, latents = _text_encoder(saved, index), _latents(saved, index)
    encoder = encoder and encoder.to(device, dtype)
    return Components(models, class_names, defaults, encoder, latents and latents.to(device))


def read_network(folder: str | os.PathLike[str], name: str) -> tuple[dict[str, Any], bytes]:
    """The spec, and the verified weights, of one network of a pipeline that `save` wrote: expert_003, router.

    Raises as `load_components`, MissingArtifact for one that it doesn't have.
    """
    root = Path(folder)
    index = _index(root)
    if index.get(name, ABSENT) == ABSENT:
        raise MissingArtifact(f"{root} has no {printable(name, 60)}")
    try:
        saved = VerifiedFolder(root, _FILES.validate_python(index["files"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptArtifact(f"{root / INDEX}: not as save_pretrained writes it ({brief(error)})") from None
    return _spec(saved, name), saved.read(f"{name}/{WEIGHTS}")


def _index(root: Path) -> dict[str, Any]:
    where = root / INDEX
    try:
        require_size(where)
        data = where.read_bytes()
    except OSError:
        raise MissingArtifact(f"{root} is not a pipeline: it has no {INDEX} that can be read") from None
    if b'"DensePipeline"' in data:
        raise RunError(
            f"{root} is an ordinary pipeline: open it with diffusers' DiffusionPipeline, as its README.md says"
        )
    if not is_ours(root):
        raise RunError(f"{root} isn't a pipeline of ours: open it with what wrote it, or fetch it again")
    index = unseal(data, f"{where}", ["_ddm_ray_version"], fix=REMEDY)
    if UNFINISHED in index:
        raise MissingArtifact(f"{root}: its export was cut off as it replaced another; export it again over this one")
    version = index["_ddm_ray_version"]
    try:
        newer = _number(version) > _number(__version__)
    except (ValueError, AttributeError):
        raise CorruptArtifact(f"{where}: its version is {version!r:.60}", REMEDY) from None
    if newer:
        raise RunError(f"{where}: saved by ddm-ray {version}, this is {__version__}: install that version")
    return index


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _info(index: dict[str, Any], clusters: tuple[int, ...]) -> MixtureInfo:
    if index.get("router_prior_K") is not None:  # folders written before have the field, null mostly
        raise RunError("its router was trained under another prior than the data's: train one again")
    prior_CK, available_K = index["prior_CK"], index["alive_K"]
    return MixtureInfo(
        len(clusters),
        tuple(index["image_shape"]),
        index["num_classes"],
        None if prior_CK is None else torch.tensor(prior_CK, dtype=torch.float64),
        available_K=None if available_K is None else torch.tensor(available_K),
        dtype={"float32": torch.float32, "float64": torch.float64}[index["dtype"]],
        trained_null=index["trained_null"],
        numbers=() if clusters == tuple(range(len(clusters))) else clusters,
    )


def _spec(saved: VerifiedFolder, name: str) -> dict[str, Any]:
    """The spec of a network, from its config.json: also what it was trained on, under "flow"."""
    path = saved.root / name / CONFIG
    config = parse_json(saved.read(f"{name}/{CONFIG}", MAX_BYTES), path)
    require_modest(config, path)
    try:
        kind, flow = config.pop("_class_name"), Flow(**config.pop("flow"))
        config.pop("_ddm_ray_version")
        adapter = config.pop("adapter", None)
        spec = {"class": kind, "config": config, "flow": flow}
        if adapter is not None:
            spec["adapter"] = AdapterConfig.model_validate(adapter).model_dump(mode="json")
        weights.build(spec, "meta")
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError, CorruptArtifact) as error:
        raise CorruptArtifact(f"{path}: {brief(error)}") from None
    return spec


def _network(saved: VerifiedFolder, name: str, spec: dict[str, Any], base: Network | None = None) -> nn.Module:
    """A network as sampling calls it; `base`: that of adapters."""
    data = saved.read(f"{name}/{WEIGHTS}")
    try:
        return matched(weights.load_model(spec, data, base), spec["flow"])
    except CorruptArtifact as error:
        raise CorruptArtifact(f"{saved.root / name / WEIGHTS}: {error}") from None


def _text_encoder(saved: VerifiedFolder, index: dict[str, Any]) -> TextEncoder | None:
    encoders: list[TextEncoder] = []
    for suffix in ("", "_2"):
        if f"text_encoder{suffix}" in index:
            for folder in (f"text_encoder{suffix}", f"tokenizer{suffix}"):
                saved.check(folder)
            encoder = text_encoder_of(saved.root, index, index.get(f"text_tokens{suffix}"), suffix)
            encoder.keeps_pooled = index.get(f"keeps_pooled{suffix}", True)  # folders written before don't say
            encoders.append(encoder)
    if len(encoders) == 2:
        encoders[0].pooled = encoders[1]
    return encoders[0] if encoders else None


def _latents(saved: VerifiedFolder, index: dict[str, Any]) -> Latents | None:
    if "vae" not in index:
        return None
    saved.check("vae")
    return latents_of(saved.root, index.get("latent_scale"), index.get("latent_shift"))


def _null_text(saved: VerifiedFolder) -> Text | None:
    if NULL_TEXT not in saved.files:
        return None
    return null_text.unpack_null_text(saved.read(NULL_TEXT), str(saved.root / NULL_TEXT))


def _write(components: Components, folder: Path, on_written: Callable[[int, int], object]) -> dict[str, Any]:
    """Writes all components; what the index says of them, but for the files' checksums."""
    models, info = components.models, components.models.info
    index: dict[str, Any] = {}
    if (base := _base_of(models)) is not None:
        index[BASE] = _write_network(base, folder / BASE)
    for expert, cluster in enumerate(info.clusters):
        name = f"expert_{cluster:03d}"
        index[name] = _write_network(models.experts[expert], folder / name)
        on_written(expert + 1, len(models.experts))
    index["router"] = _write_network(models.router, folder / "router")
    encoder = components.text_encoder
    for suffix, one in (("", encoder), ("_2", encoder and encoder.pooled)):
        if one is None:
            continue
        for name, part in ((f"text_encoder{suffix}", one.model), (f"tokenizer{suffix}", one.tokenizer)):
            part.save_pretrained(folder / name)
            index[name] = ["transformers", type(part).__name__]
        index |= {f"text_tokens{suffix}": one.tokens, f"keeps_pooled{suffix}": one.keeps_pooled}
    if components.latents is not None:
        components.latents.autoencoder.save_pretrained(folder / "vae")
        index["vae"] = ["diffusers", type(components.latents.autoencoder).__name__]
        index |= {"latent_scale": components.latents.scale, "latent_shift": components.latents.shift}
    if info.null_text is not None:
        (folder / NULL_TEXT).write_bytes(null_text.pack_null_text(info.null_text))
    return index | {
        "class_names": list(components.class_names),
        "defaults": components.defaults.model_dump(mode="json"),
        "image_shape": list(info.image_shape),
        "num_classes": info.num_classes,
        "prior_CK": None if info.prior_CK is None else info.prior_CK.double().tolist(),
        "alive_K": None if info.available_K is None else info.available_K.tolist(),
        "dtype": str(info.dtype).removeprefix("torch."),
        "trained_null": info.trained_null,
    }


def _base_of(models: Models) -> Network | None:
    """The base of adapters; None for experts that are whole networks. SamplingError if there are several."""
    networks = [bare(models.experts[number]) for number in range(len(models.experts))]
    bases = {id(each.base): each.base for each in networks if isinstance(each, Network) and each.base is not None}
    if len(bases) > 1:
        raise SamplingError("experts are adapters of several networks: load them together, so that they share one")
    return next(iter(bases.values()), None)


def _write_network(model: Any, folder: Path) -> list[str | None]:
    if model is None:
        return list(ABSENT)
    if config_of(model) is None:
        what = "offloaded to host memory: load it without, or from disk" if callable(model) else "without a config"
        raise SamplingError(f"{folder.name} can't be saved: it is {what}")
    flow = model.flow if isinstance(model, VelocityField | MatchedRouter) else Flow()
    spec = weights.spec_of_model(bare(model))
    tensors, _ = weights.weights_as_bytes(bare(model), spec)
    config = {"_class_name": spec["class"], "_ddm_ray_version": __version__, **spec["config"], "flow": asdict(flow)}
    if "adapter" in spec:
        config["adapter"] = spec["adapter"]
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (folder / WEIGHTS).write_bytes(tensors)
    return ["ddm_ray", spec["class"]]
