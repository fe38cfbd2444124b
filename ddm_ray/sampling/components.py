"""The components of a pipeline, and the loading of those of other libraries: text encoders and autoencoders."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddm_ray.config import SamplingSettings
from ddm_ray.core.snr import bare
from ddm_ray.errors import ConfigError, CorruptArtifact, ExpertCountError, MissingArtifact, SamplingError
from ddm_ray.models import third_party
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import MODELS, OTHER_HALF, TextEncoder
from ddm_ray.models.third_party import brief
from ddm_ray.sampling.export_folder import INDEX
from ddm_ray.sampling.offload import Offloaded
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import Models
from ddm_ray.sampling.shared_base import SharedBase
from ddm_ray.spelling import printable

CONFIG = "config.json"
MAX_POSITIONS = 1 << 28
"""Numbers in the table of positions of a network: its patches times its width."""


@dataclass(frozen=True)
class Components:
    """All that a pipeline is made of. `class_names`: of labels 0, 1, ...; none for texts.

    Raises ExpertCountError, SamplingError for components that don't fit each other.
    """

    models: Models
    class_names: tuple[str, ...] = ()
    defaults: SamplingSettings = field(default_factory=SamplingSettings)
    text_encoder: TextEncoder | None = None
    latents: Latents | None = None

    def __post_init__(self) -> None:
        models, info = self.models, self.models.info
        if self.class_names and len(self.class_names) != info.num_classes:
            raise SamplingError(f"{len(self.class_names)} class_names for models of {info.num_classes} classes")
        experts: list[Any] = [None] * len(models.experts)
        if not isinstance(models.experts, Offloaded):  # those were checked where they are known
            experts = [models.experts[k] for k in range(len(models.experts))]
        configs = [config_of(expert) for expert in experts]
        require_fit(info, configs, config_of(models.router))
        if self.latents is not None and self.latents.channels != info.image_shape[0]:
            raise SamplingError(
                f"the autoencoder has {self.latents.channels} latent channels, the models are for images of shape"
                f" {tuple(info.image_shape)}"
            )
        if self.text_encoder is not None and info.null_text is not None:
            _require_text_dim(info.null_text.tokens_BLE.shape[2], [*configs, config_of(models.router)])

    def to(self, device: str | None, dtype: torch.dtype | None) -> "Components":
        """All networks move to the device, experts, router and text encoder to dtype, as torch's do; None: none.

        The autoencoder stays in its precision. SamplingError for experts that are offloaded, elsewhere or otherwise.
        """
        models, place = self.models, self.models.device if device is None else device
        networks: list[Any] = [models.router]
        if isinstance(models.experts, SharedBase):
            models.experts.to(place, dtype)
        elif not isinstance(models.experts, Offloaded):
            networks += [models.experts[k] for k in range(len(models.experts))]
        elif _place(place) != _place(models.device) or dtype not in (None, models.dtype):
            raise SamplingError("offloaded experts stay where they are: open the pipeline with that device and dtype")
        for network in networks:
            if isinstance(network, nn.Module):
                network.to(place, dtype)
        if self.text_encoder is not None:
            self.text_encoder.to(place, dtype)
        if self.latents is not None:
            self.latents.to(place)
        return replace(self, models=replace(models, device=place))


def _place(device: str) -> tuple[str, int]:
    named = torch.device(device)
    return named.type, named.index or 0


def require_fit(info: MixtureInfo, experts: Sequence[dict[str, Any] | None], router: dict[str, Any] | None) -> None:
    """ExpertCountError or SamplingError unless networks of these configs (None: not there, or unknown) fit `info`."""
    if len(experts) != info.num_experts:
        raise ExpertCountError(f"{len(experts)} experts for a mixture of {info.num_experts}: use None for a gap")
    named = zip(info.clusters, experts, strict=True)
    known = {f"expert {number}": config for number, config in named if config is not None}
    if router is not None:
        if router.get("num_experts", info.num_experts) != info.num_experts:
            raise ExpertCountError(
                f"the router speaks of {router['num_experts']} experts, the mixture has {info.num_experts}:"
                " load the router that was trained with these experts"
            )
        known["the router"] = router
    for name, config in known.items():
        # Other libraries' transformers say these things in words of their own.
        if not {"image_size", "channels", "num_classes", "text_dim"} <= config.keys():
            continue
        shape = (config["channels"], config["image_size"], config["image_size"])
        if shape != tuple(info.image_shape):
            raise SamplingError(f"{name} is for images of shape {shape}, the mixture for {tuple(info.image_shape)}")
        if info.num_classes is None and config["num_classes"] is not None:
            raise SamplingError(f"{name} is conditioned on classes, the mixture on texts")
        if info.num_classes is not None and config["text_dim"] is not None:
            raise SamplingError(f"{name} is conditioned on texts, the mixture on classes")
        if config["num_classes"] not in (None, info.num_classes):
            raise SamplingError(f"{name} knows {config['num_classes']} classes, the mixture {info.num_classes}")


def require_modest(config: dict[str, Any], path: Path) -> None:
    """CorruptArtifact for the config of a network of ours, of somebody else, that would take no end of memory or time.

    Its positions are made before its weights are seen, so their size is bounded here.
    """
    third_party.require_plain(config, path)
    values = (config.get(name) for name in ("image_size", "patch_size", "width"))
    side, patch, width = (value if isinstance(value, int) else 0 for value in values)
    if (positions := (side // max(1, patch)) ** 2 * width) > MAX_POSITIONS:
        most = f"{MAX_POSITIONS} is the most"
        raise CorruptArtifact(f"{path}: has {positions} numbers of positions, {most}; fetch it again")


def _require_text_dim(given: int, configs: Sequence[dict[str, Any] | None]) -> None:
    for config in configs:
        if config is not None and config.get("text_dim") not in (None, given):
            raise SamplingError(
                f"the text encoder gives {given} channels, the models take {config['text_dim']}: use the encoder that"
                " they were trained with"
            )


def config_of(model: Any) -> dict[str, Any] | None:
    """The constructor's arguments of a network, matched or not; None where it doesn't keep them."""
    network = bare(model)
    config = getattr(network, "config", None) if isinstance(network, nn.Module) else None
    return config if isinstance(config, dict) else None


def text_encoder_of(root: Path, kinds: dict[str, Any], tokens: int | None, suffix: str = "") -> TextEncoder:
    """From the folders text_encoder and tokenizer, each of the (library, class) that `kinds`, the index, says."""
    third_party.require_plain(kinds, root / INDEX)
    model, tokenizer = f"text_encoder{suffix}", f"tokenizer{suffix}"
    model_class = _foreign_class(root, model, kinds, MODELS.values())
    tokenizer_class = _foreign_class(root, tokenizer, kinds, third_party.TOKENIZERS)
    encoder = TextEncoder(
        third_party.load_pretrained(tokenizer_class, str(root / tokenizer), "tokenizer"),
        third_party.load_pretrained_model(model_class, _with_config(root, model), "text encoder", OTHER_HALF),
        tokens,
    )
    try:
        encoder.null()
    except Exception as error:  # a border: files that are unfit may be noticed only now, in any way
        message = f"{root}: {model} and {tokenizer} can't encode a text ({brief(error)}); fetch them again"
        raise CorruptArtifact(message) from error
    return encoder


def latents_of(root: Path, scale: float | None = None, shift: float | None = None) -> Latents:
    """From the folder vae; scale and shift are the autoencoder's own unless given."""
    return Latents.from_pretrained(_with_config(root, "vae"), scale, shift)


def _foreign_class(root: Path, name: str, kinds: dict[str, Any], allowed: Collection[str]) -> Any:
    """The class of transformers that the index says a component is of, one of those allowed."""
    named = kinds.get(name)
    if not isinstance(named, list) or named not in [["transformers", kind] for kind in allowed]:
        known = ", ".join(sorted(set(allowed)))
        raise CorruptArtifact(
            f"{root / INDEX}: {name} is {printable(repr(named), 60)}; of transformers, use one of {known}"
        )
    _require_folder(root, name)
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{name} needs transformers: install it with: pip install 'ddm-ray[text]'") from None
    return getattr(transformers, named[1])


def _with_config(root: Path, name: str) -> str:
    _require_folder(root, name)
    if not (root / name / CONFIG).is_file():
        raise MissingArtifact(f"{root / name} lacks {CONFIG}: fetch or save the pipeline again")
    return str(root / name)


def _require_folder(root: Path, name: str) -> None:
    if not (root / name).is_dir():
        raise MissingArtifact(f"{root} lacks the folder {name}: fetch or save the pipeline again")
