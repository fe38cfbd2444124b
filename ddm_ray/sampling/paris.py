"""Import of checkpoints laid out as Paris's: bageldotcom/paris, eight text-conditioned DiT-XL/2 and a router, MIT.

Public: the folders, and the fields of each config.json. The parameters that these imply here are as many as its
authors say for the router (129M) and .3 % more for an expert (607.0M against 605M; tests/models/test_counts.py), so
that something there, perhaps the projection of the text, may have another form: it would be refused by its tensor's
name or shape. Not public, so not verified: the names of the tensors, taken from the implementations that such files
follow (facebookresearch/DiT, PixArt-alpha/PixArt-alpha; the router's head from none); which end of time is noise, and
that the networks are given 1000 t; that a prompt's padding is masked; steps and guidance scale to sample with. Where
one of those differs the import succeeds and the images are wrong: look at them.

Shapes: C conditions, K experts.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ddm_ray.config import SamplingSettings
from ddm_ray.errors import CorruptArtifact, ExpertCountError, MissingArtifact
from ddm_ray.models import weights
from ddm_ray.models.third_party import read_json
from ddm_ray.sampling.components import (
    CONFIG,
    INDEX,
    Components,
    latents_of,
    require_fit,
    require_modest,
    text_encoder_of,
)
from ddm_ray.sampling.offload import Offload, resident_experts
from ddm_ray.sampling.paris_weights import Reading, load_network
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import Models, SamplingPrecision, dtype_of

MOST = 1 << 20
"""Of any number that says a size."""
EXPERT_WEIGHTS, ROUTER_WEIGHTS = "diffusion_pytorch_model.safetensors", "pytorch_model.safetensors"


def is_paris(folder: str | os.PathLike[str]) -> bool:
    """True for a folder with the layout: its config.json has num_experts. One of ours has none."""
    try:
        return "num_experts" in read_json(Path(folder) / CONFIG)
    except (OSError, CorruptArtifact):
        return False


def load(
    folder: str | os.PathLike[str],
    device: str = "cpu",
    offload: Offload | None = None,
    reading: Reading | None = None,
    precision: SamplingPrecision = "fp32",
) -> Components:
    """All of the folder's components. Its prior over experts isn't known: `once` asks the router at pure noise.

    Raises MissingArtifact, CorruptArtifact, TruncatedWeights (which name file and tensor), ExpertCountError.
    """
    root, reading, dtype = Path(folder), reading or Reading(), dtype_of(precision)
    about, index = _read_json(root / CONFIG), _read_json(root / INDEX)
    count, image_size = (_positive_int(about, name, root / CONFIG) for name in ("num_experts", "image_size"))
    specs = [_expert_spec(root / f"expert_{expert}" / CONFIG, image_size) for expert in range(count)]
    router_spec = _router_spec(root / "router" / CONFIG, image_size)
    if (num_folders := _num_folders(root)) != count:
        raise ExpertCountError(f"{root}: {CONFIG} speaks of {count} experts, {num_folders} folders expert_N are there")
    info = _info(specs)
    require_fit(info, [spec["config"] for spec in specs], router_spec["config"])

    def fetch(expert: int, where: str) -> nn.Module:
        return load_network(root / f"expert_{expert}" / EXPERT_WEIGHTS, specs[expert], reading).to(where, dtype)

    experts = resident_experts(fetch, [True] * count, offload, device, dtype)
    router = load_network(root / "router" / ROUTER_WEIGHTS, router_spec, reading).to(device, dtype)
    encoder = latents = None
    if info.num_classes is None:
        encoder = text_encoder_of(root, index, None).to(device)
        info = replace(info, null_text=encoder.null().to("cpu"))
        encoder = encoder.to(device, dtype)
    # Without dropout of conditions in training the networks know no null one.
    dropout = [_read_json(root / f"expert_{expert}" / CONFIG).get("cfg_dropout_prob") for expert in range(count)]
    info = replace(info, trained_null=all(dropout))
    if about.get("use_latents"):
        latents = latents_of(root).to(device)
    # top-2 is what its authors found best; steps and scale are those of the decentralized diffusion paper.
    scale = 7.5 if info.trained_null and info.num_classes != 0 else 1.0
    defaults = SamplingSettings(strategy=f"top-{min(2, count)}", steps=50, guidance_scale=scale)
    return Components(Models(info, experts, router, device), (), defaults, encoder, latents)


def load_network_of(folder: str | os.PathLike[str], name: str, require: Callable[[dict[str, Any]], None]) -> nn.Module:
    """One network of the folder, expert_3 or router, once `require` has seen its spec. Raises as `load`."""
    root = Path(folder)
    image_size = _positive_int(_read_json(root / CONFIG), "image_size", root / CONFIG)
    spec = (_router_spec if name == "router" else _expert_spec)(root / name / CONFIG, image_size)
    require(spec)
    return load_network(root / name / (ROUTER_WEIGHTS if name == "router" else EXPERT_WEIGHTS), spec)


def _info(specs: Sequence[dict[str, Any]]) -> MixtureInfo:
    """The mixture of these experts, which are all alike. No file has their prior."""
    config = specs[0]["config"]
    # Neither labels nor texts: every image is unconditional.
    num_classes = None if config["text_dim"] is not None else config["num_classes"] or 0
    shape = (config["channels"], config["image_size"], config["image_size"])
    return MixtureInfo(len(specs), shape, num_classes, prior_CK=None)


def _expert_spec(path: Path, image_size: int) -> dict[str, Any]:
    config = _read_json(path)
    trunk = _trunk(config, path, image_size)
    if _field(config, "out_channels", path) != trunk["channels"]:
        raise CorruptArtifact(f"{path}: out_channels is {config['out_channels']}, a velocity has {trunk['channels']}")
    text = _positive_int(config, "text_embed_dim", path) if _field(config, "use_text_conditioning", path) else None
    classes = _positive_int(config, "num_classes", path) if config.get("use_class_conditioning") else None
    return _checked({"class": "DiT", "config": {**trunk, "text_dim": text, "num_classes": classes}}, path)


def _router_spec(path: Path, image_size: int) -> dict[str, Any]:
    config = _read_json(path)
    arguments = {"num_experts": _positive_int(config, "num_clusters", path), **_trunk(config, path, image_size)}
    return _checked({"class": "Router", "config": {**arguments, "text_dim": None, "num_classes": None}}, path)


def _trunk(config: dict[str, Any], path: Path, image_size: int) -> dict[str, Any]:
    for name, supported in (("architecture", "dit"), ("use_dit_time_embed", True)):
        if _field(config, name, path) != supported:
            raise CorruptArtifact(f"{path}: {name} is {config[name]!r}, only {supported!r} can be imported")
    mlp_ratio = config.get("mlp_ratio", 4.0)
    if isinstance(mlp_ratio, bool) or not isinstance(mlp_ratio, int | float) or not 0 < mlp_ratio < math.inf:
        raise CorruptArtifact(f"{path}: mlp_ratio is {mlp_ratio!r:.60}, not a number above 0; fetch it again")
    return {
        "image_size": image_size,
        "channels": _positive_int(config, "in_channels", path),
        "patch_size": _positive_int(config, "patch_size", path),
        "width": _positive_int(config, "hidden_size", path),
        "depth": _positive_int(config, "num_layers", path),
        "heads": _positive_int(config, "num_heads", path),
        "mlp_ratio": mlp_ratio,
        "adaln": "single" if config.get("use_adaln_single") else "zero",
    }


def _checked(spec: dict[str, Any], path: Path) -> dict[str, Any]:
    require_modest(spec["config"], path)
    try:
        weights.build(spec, "meta")
    except CorruptArtifact as error:
        raise CorruptArtifact(f"{path}: {error}") from None
    return spec


def _num_folders(root: Path) -> int:
    return sum(1 for path in root.glob("expert_*") if path.is_dir())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except OSError:
        raise MissingArtifact(f"{path} is missing or can't be read: fetch it again") from None


def _field(config: dict[str, Any], name: str, path: Path) -> Any:
    if name not in config:
        raise CorruptArtifact(f"{path}: lacks the field {name}; fetch it again")
    return config[name]


def _positive_int(config: dict[str, Any], name: str, path: Path) -> int:
    value = _field(config, name, path)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise CorruptArtifact(f"{path}: {name} is {value!r:.60}, not a whole number from 1 to {MOST}; fetch it again")
    return value
