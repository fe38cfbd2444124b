"""CLIP: images and texts as vectors of one space. Shapes: N images or texts, D dimensions."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ddm_ray.errors import ConfigError
from ddm_ray.models import third_party
from ddm_ray.models.embedder_networks import rgb
from ddm_ray.models.embedders import row_slices

BATCH = 64


class Clip:
    """A CLIPModel of transformers with its own tokenizer and preprocessing of images."""

    def __init__(self, model: Any, tokenizer: Any, processor: Any, device: str = "cpu"):
        self._model, self._device = model.eval().to(device), device
        self._tokenizer, self._processor = tokenizer, processor

    @classmethod
    def from_pretrained(cls, name: str, device: str = "cpu", field: str = "evaluate.clip") -> Self:
        """From a folder, or a name of the hub. ConfigError if it holds no CLIP, CorruptArtifact if it isn't whole."""
        try:
            import transformers
        except ImportError:
            raise ConfigError(f"{field} needs transformers: install it with: pip install 'ddm-ray[text]'") from None
        third_party.require_config(name, field)
        kind = third_party.load_pretrained(transformers.AutoConfig, name, field).model_type
        if kind != "clip":
            raise ConfigError(f"{field} {name}: is a {kind}, not a CLIP of images and texts")
        arguments = {"dtype": torch.float32}
        model = third_party.load_pretrained_model(transformers.CLIPModel, name, field, arguments=arguments)
        tokenizer = third_party.load_pretrained(transformers.AutoTokenizer, name, field)
        return cls(model, tokenizer, third_party.load_pretrained(transformers.AutoImageProcessor, name, field), device)

    @torch.inference_mode()
    def texts(self, captions: Sequence[str]) -> Tensor:
        """Unit vectors (N, D), float32, on the CPU; what is longer than its context is cut off, as CLIP does."""
        longest = self._model.config.text_config.max_position_embeddings
        parts = []
        for rows in row_slices(len(captions), BATCH):
            tokens = self._tokenizer(
                [*captions[rows]], padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
            ids, mask = tokens["input_ids"].to(self._device), tokens["attention_mask"].to(self._device)
            parts.append(_unit(self._model.get_text_features(input_ids=ids, attention_mask=mask)))
        return torch.cat(parts)

    @torch.inference_mode()
    def images(self, pixels_NHWC: np.ndarray) -> Tensor:
        """Unit vectors (N, D), float32, on the CPU, of uint8 images; grey ones are taken as RGB."""
        parts = []
        for rows in row_slices(len(pixels_NHWC), BATCH):
            images = list(rgb(pixels_NHWC[rows]))
            inputs = self._processor(images=images, return_tensors="pt", input_data_format="channels_last")
            values = inputs["pixel_values"].to(self._device, torch.float32)
            parts.append(_unit(self._model.get_image_features(pixel_values=values)))
        return torch.cat(parts)


def _unit(features: Any) -> Tensor:
    features_ND: Tensor = getattr(features, "pooler_output", features)
    return normalize(features_ND.float(), dim=1).cpu()
