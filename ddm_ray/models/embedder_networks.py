"""Embedders that are networks: pooled features of timm's and of transformers' image models, and the FID's Inception.

Images are uint8 NHWC, grey (C = 1) or RGB: N rows, B of them in a batch; D dimensions of an embedding.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddm_ray.config import EmbedderConfig
from ddm_ray.core.transfer import frozen_dtype, sent, upload
from ddm_ray.errors import ConfigError, DataError
from ddm_ray.models import lite0, third_party
from ddm_ray.models.embedders import Embedder, row_slices
from ddm_ray.models.fingerprints import fingerprint_of

OTHER_HALF = ("text_model.", "text_projection.", "logit_scale", "logit_bias")
"""Beginnings of the tensors that a model of images and texts has and its image model doesn't."""
IMAGE_MODELS = frozenset(
    {"clip", "clip_vision_model", "convnext", "convnextv2", "dinov2", "dinov2_with_registers", "dinov3_vit"}
    | {"siglip", "siglip_vision_model", "vit"}
)
"""Kinds of transformers' models that embed images."""
IMAGE_CLASSES = {
    "CLIPModel": ("CLIPVisionModelWithProjection", OTHER_HALF),
    "CLIPVisionModelWithProjection": ("CLIPVisionModelWithProjection", ()),
    "SiglipModel": ("SiglipVisionModel", OTHER_HALF),
}
"""By the class that was saved: the class that embeds images, where it isn't transformers' own choice."""


class TimmEmbedder:
    """Pooled features of a timm network, e.g. DINOv2, or EfficientNet-Lite0 by its package (kind lite0).

    Images are resized whole to the network's size and normalised as it was trained: they are cropped already.
    """

    def __init__(self, config: EmbedderConfig, device: str = "cpu", field: str = "embedder", exact: bool = False):
        """Load `config.checkpoint`, or timm's own weights; `exact`: see `make_embedder`.

        DataError if they are missing or don't fit.
        """
        import timm

        _require_file(config, field)
        # Beside an older run's file of another kind, which may hold code, its tensors may lie as safetensors.
        checkpoint = config.checkpoint and Path(config.checkpoint).with_suffix(".safetensors")
        if checkpoint and not checkpoint.is_file():
            raise DataError(
                f"{field}.checkpoint {config.checkpoint}: only safetensors are read; write its tensors to {checkpoint}"
                " with safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'FILE.safetensors')"
            )
        if ":" in config.model:
            raise DataError(f"{field}.model {config.model}: use the name of a network of timm's own")
        # As pretrained weights, a file is fitted to image size and classes as the network's own weights would be.
        own: dict[str, Any] | None = None
        if config.kind == "lite0":
            own = {"state_dict": lite0.tensors(field), "source": ""}
        elif checkpoint:
            own = {"file": str(checkpoint), "custom_load": False, "source": ""}
        self._batch_size, self._device, self._dtype = config.batch_size, device, _precision(device, exact)
        image_size = config.image_size or (lite0.IMAGE_SIZE if config.kind == "lite0" else None)
        try:
            own_size = {} if image_size is None else {"img_size": image_size}
            sized = {**config.model_args, **own_size}
            arguments = {"pretrained": True, "pretrained_cfg_overlay": own, "num_classes": 0}
            try:
                model = timm.create_model(config.network, **arguments, **sized)
            except TypeError as error:  # a convolutional network takes any size, and isn't told
                if not own_size or "'img_size'" not in str(error):
                    raise
                model = timm.create_model(config.network, **arguments, **config.model_args)
            expects = timm.data.resolve_data_config(sized, model=model)
            self._size: tuple[int, int] = tuple(expects["input_size"][1:])
            self._mode = "bilinear" if expects["interpolation"] == "bilinear" else "bicubic"
            self._mean_C11 = torch.tensor(expects["mean"])[:, None, None].to(device)
            self._std_C11 = torch.tensor(expects["std"])[:, None, None].to(device)
            about = [self._size, self._mode, expects["mean"], expects["std"]]
            self.fingerprint = fingerprint_of(model, about)
            if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
                self._dtype = torch.float32  # running means don't bear bf16
            self._model = model.eval().to(device, self._dtype)
            self.dim = _probe(self)
        except Exception as error:  # timm passes on whatever its hub, readers and models raise
            mend = f"begin a run with {field}.model_args that fit the file"
            if config.checkpoint is None:
                mend = f"without a network, begin a run with {field}.checkpoint set to a file of its weights"
            raise DataError(
                f"{field} {config.network} with {config.checkpoint or 'pretrained weights'}:"
                f" {third_party.brief(error)}; {mend}"
            ) from error

    @torch.no_grad()
    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray:
        """embeddings_ND float32; grey images are taken as RGB."""
        return _in_batches(self._embed, pixels_NHWC, self._batch_size)

    def _embed(self, pixels_BHWC: np.ndarray) -> Tensor:
        pixels_BCHW = upload(pixels_BHWC, self._device).permute(0, 3, 1, 2)
        images_BCHW = pixels_BCHW.float() / 255
        if images_BCHW.shape[2:] != self._size:
            images_BCHW = torch.nn.functional.interpolate(images_BCHW, self._size, mode=self._mode, antialias=True)
        images_BCHW = (images_BCHW.clamp(0, 1) - self._mean_C11) / self._std_C11
        embeddings: Tensor = self._model(images_BCHW.to(self._dtype))
        return embeddings


class TransformersEmbedder:
    """Pooled features of an image model of transformers (DINOv2, ViT, CLIP, SigLIP), with its own preprocessing.

    The pooled vector is the model's, of CLIP the projected one; else the mean of its tokens.
    """

    def __init__(self, config: EmbedderConfig, device: str = "cpu", field: str = "embedder", exact: bool = False):
        """Load the folder or name of the hub `config.model`; a folder needs no network. `exact`: see `make_embedder`.

        ConfigError if it holds no image model, CorruptArtifact if that isn't whole.
        """
        try:
            import transformers
        except ImportError:
            raise ConfigError(
                f"{field}.kind transformers needs transformers: install it with: pip install 'ddm-ray[text]'"
            ) from None
        name, what = config.model, field
        third_party.require_config(name, what)
        about = third_party.load_pretrained(transformers.AutoConfig, name, what)
        saved = (about.architectures or [""])[0]
        kind_name, ignored = IMAGE_CLASSES.get(saved, (None, ()))
        kind: Any = getattr(transformers, kind_name) if kind_name else transformers.MODEL_MAPPING.get(type(about), None)
        if about.model_type not in IMAGE_MODELS or getattr(kind, "main_input_name", None) != "pixel_values":
            raise ConfigError(
                f"{field} {name}: is a {about.model_type}, no image model of those known; begin a run with one:"
                f" {', '.join(sorted(IMAGE_MODELS))}"
            )
        arguments: dict[str, Any] = {"dtype": torch.float32, **config.model_args}
        if saved.endswith("ForImageClassification"):
            # Its head is of no use here, and the pooling that a bare ViT has was never trained.
            ignored = ("classifier.", "head.")
            if saved.startswith("ViT"):
                arguments.setdefault("add_pooling_layer", False)
        model = third_party.load_pretrained_model(kind, name, what, ignored, arguments).eval()
        self._processor = third_party.load_pretrained(transformers.AutoImageProcessor, name, what)
        self._batch_size, self._device, self._dtype = config.batch_size, device, _precision(device, exact)
        self.fingerprint = fingerprint_of(model, self._processor.to_json_string())
        self._model = model.to(device, self._dtype)
        try:
            self.dim = _probe(self)
        except Exception as error:  # a border: a folder may hold any model and processor
            raise DataError(f"{field} {name}: embeds no image ({third_party.brief(error)})") from error

    @torch.no_grad()
    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray:
        """embeddings_ND float32; grey images are taken as RGB."""
        return _in_batches(self._embed, pixels_NHWC, self._batch_size)

    def _embed(self, pixels_BHWC: np.ndarray) -> Tensor:
        inputs = self._processor(images=list(pixels_BHWC), return_tensors="pt", input_data_format="channels_last")
        outputs = self._model(pixel_values=sent(inputs["pixel_values"], self._device).to(self._dtype))
        pooled: Tensor | None = getattr(outputs, "pooler_output", None)
        if pooled is None:
            pooled = getattr(outputs, "image_embeds", None)
        if pooled is None:
            pooled = outputs.last_hidden_state.mean(dim=1)
        # Convolutional networks keep two sides of one pixel.
        return pooled.flatten(1)


class InceptionEmbedder:
    """Features of the FID (arXiv 1706.08500): the 2,048 of the last pooling of Inception-v3, by torch-fidelity.

    It resizes images to 299 pixels as TensorFlow 1 did, so that distances are those of the field's own code.
    """

    dim = 2048

    def __init__(self, config: EmbedderConfig, device: str = "cpu", field: str = "embedder"):
        """Load `config.checkpoint`, or what torch-fidelity downloads. DataError if that is missing or doesn't fit.

        ConfigError without torch-fidelity.
        """
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError:
            raise ConfigError(
                f"{field}.kind inception needs torch-fidelity: install it with: pip install 'ddm-ray[fid]'"
            ) from None
        _require_file(config, field)
        self._batch_size, self._device = config.batch_size, device
        try:
            weights = None if config.checkpoint is None else io.BytesIO(Path(config.checkpoint).read_bytes())
            if weights is not None:
                torch.load(weights, weights_only=True)  # refuses code, which torch-fidelity would run
                weights.seek(0)
            network = FeatureExtractorInceptionV3(field, [str(self.dim)], feature_extractor_weights_path=weights)
            self.fingerprint = fingerprint_of(network)
            self._model = network.to(device)
        except Exception as error:  # a border: a file may hold anything, and a download may fail in any way
            mend = "put the weights of torch-fidelity there"
            if config.checkpoint is None:
                mend = f"without a network, begin a run with {field}.checkpoint set to a file of its weights"
            weights_of = config.checkpoint or "downloaded weights"
            raise DataError(f"{field} inception with {weights_of}: {third_party.brief(error)}; {mend}") from error

    @torch.no_grad()
    def __call__(self, pixels_NHWC: np.ndarray) -> np.ndarray:
        """features_ND float32; grey images are taken as RGB."""
        return _in_batches(self._embed, pixels_NHWC, self._batch_size)

    def _embed(self, pixels_BHWC: np.ndarray) -> Tensor:
        features: Tensor = self._model(upload(pixels_BHWC, self._device).permute(0, 3, 1, 2))[0]
        return features


def _in_batches(embed: Callable[[np.ndarray], Tensor], pixels_NHWC: np.ndarray, size: int) -> np.ndarray:
    """embeddings_ND float32 of all rows, embedded so many at a time; a GPU is waited for once, in the end."""
    # fp32 is fp32: by itself cuDNN would round what it convolves to TF32's 10 bits.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        # Copies: Ray's arrays can't be written to, and torch warns of them.
        parts = [embed(np.array(rgb(pixels_NHWC[rows]))) for rows in row_slices(len(pixels_NHWC), size)]
        embeddings_ND: np.ndarray = torch.cat(parts).float().cpu().numpy()
    return embeddings_ND


def _precision(device: str, exact: bool) -> torch.dtype:
    """Precision that a network computes in: float32, or bf16 on a GPU where it needn't be exact."""
    return torch.float32 if exact else frozen_dtype(device)


def _require_file(config: EmbedderConfig, field: str) -> None:
    if config.checkpoint is not None and not Path(config.checkpoint).is_file():
        raise DataError(
            f"{field}.checkpoint {config.checkpoint}: no such file; put it there, or begin a run with another"
        )


def _probe(embedder: Embedder) -> int:
    embeddings_ND = embedder(np.zeros((1, 32, 32, 3), np.uint8))
    if embeddings_ND.ndim != 2:
        raise ValueError(f"gives {embeddings_ND.ndim - 1} axes for an image, not one vector")
    return int(embeddings_ND.shape[1])


def rgb(pixels_BHWC: np.ndarray) -> np.ndarray:
    """Images of three channels, of grey ones three times the same."""
    return pixels_BHWC if pixels_BHWC.shape[3] == 3 else pixels_BHWC.repeat(3, axis=3)
