"""DDMPipeline: images from a finished run in three lines, with the interface of a diffusers pipeline and without Ray.

Shapes: B images, C channels, H, W, S steps, K experts.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, get_args, overload

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ddm_ray.config import SamplingSettings
from ddm_ray.core.condition import Text
from ddm_ray.core.times import time_grid
from ddm_ray.core.transfer import frozen_dtype
from ddm_ray.errors import SamplingError
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder
from ddm_ray.run.run import Run
from ddm_ray.sampling import arguments, pretrained
from ddm_ray.sampling.batches import joined
from ddm_ray.sampling.call import call_of
from ddm_ray.sampling.components import Components
from ddm_ray.sampling.devices import choose_device
from ddm_ray.sampling.labels import Label, Prompt
from ddm_ray.sampling.offload import Offload
from ddm_ray.sampling.output import DDMOutput, Images, OutputType, images_as
from ddm_ray.sampling.run_models import (
    ModelKind,
    Models,
    OnLoaded,
    SamplingPrecision,
    dtype_of,
    load_models,
    row_networks,
    sampling_settings,
)
from ddm_ray.sampling.step_callbacks import TENSORS, StepCallback, StepEnds, tensor_inputs

MAX_DECODED = 8
"""Number of latents that an autoencoder decodes at once. It takes far more memory than the latents."""


class DDMPipeline:
    """Samples from a mixture of experts, or from one model, in this process.

    `class_names`: names of labels 0, 1, ... `defaults`: settings of calls that leave them out. `text_encoder`: for
    models of texts. `latents`: for models of latents. Raises ExpertCountError and SamplingError for components that
    don't fit together.
    """

    def __init__(
        self,
        models: Models,
        *,
        class_names: Sequence[str] = (),
        defaults: SamplingSettings | None = None,
        text_encoder: TextEncoder | None = None,
        latents: Latents | None = None,
    ):
        info = models.info
        if text_encoder is not None and info.num_classes is None and info.null_text is None:
            models = replace(models, info=replace(info, null_text=text_encoder.null().to("cpu")))
        self.components = Components(models, tuple(class_names), defaults or SamplingSettings(), text_encoder, latents)
        self._interrupt, self._num_timesteps = False, 0
        self._progress_bar_config: dict[str, Any] = {}

    @property
    def models(self) -> Models:
        return self.components.models

    @property
    def device(self) -> torch.device:
        """The device on which networks compute."""
        return torch.device(self.models.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the experts' weights."""
        return self.models.dtype

    @property
    def interrupt(self) -> bool:
        """True if the last call ends, or has ended, before its next step. Set `_interrupt` to make it end."""
        return self._interrupt

    @property
    def num_timesteps(self) -> int:
        """Number of steps of the last call."""
        return self._num_timesteps

    @classmethod
    def from_run(
        cls,
        run: str | os.PathLike[str] | Run,
        device: str | torch.device = "cpu",
        model: ModelKind = "mixture",
        offload: Offload | None = None,
        dtype: SamplingPrecision | None = None,
        torch_dtype: SamplingPrecision | None = None,
        on_loaded: OnLoaded | None = None,
    ) -> Self:
        """Load a run's finished models and verify every byte. The router is left out if it isn't finished yet.

        `offload` keeps two experts on the device, and the others in files ("disk") or in host memory ("host"). `dtype`
        is that of the networks and the text encoder: torch.float32, bfloat16 or float16, or "fp32", "bf16", "fp16". The
        default is bf16 on a GPU that supports it, else float32; `torch_dtype` is diffusers' name for it. Images and the
        autoencoder stay in float32. `on_loaded` is called after each network, with the number of loaded ones and of
        all. Raises RunError, MissingArtifact, CorruptArtifact, and ConfigError for a text encoder or autoencoder that
        can't be found.
        """
        if model not in get_args(ModelKind):
            raise SamplingError(f"unknown model {model!r}: use {', '.join(get_args(ModelKind))}")
        place = choose_device(device)
        weights = _dtype(place, dtype, torch_dtype)
        run = run if isinstance(run, Run) else Run.open(os.fspath(run))
        data, models = run.config.data, load_models(run, model, place, offload, weights, on_loaded=on_loaded)
        known, encoder, latents = row_networks(run), None, None
        if data.text is not None:
            encoder = TextEncoder.from_config(data.text, known.get("text encoder")).to(place)
        if data.latents is not None:
            latents = Latents.from_config(data.latents, known.get("autoencoder")).to(place)
        defaults = sampling_settings(run, model)
        names = run.named.data.class_names
        made = cls(models, class_names=names, defaults=defaults, text_encoder=encoder, latents=latents)
        return made.to(weights)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: str | torch.device = "cpu",
        offload: Offload | None = None,
        dtype: SamplingPrecision | None = None,
        torch_dtype: SamplingPrecision | None = None,
        on_loaded: OnLoaded | None = None,
    ) -> Self:
        """Load a folder that `save_pretrained` wrote. `offload`, `dtype`, `torch_dtype`, `on_loaded`: see `from_run`.

        Raises MissingArtifact, RunError, CorruptArtifact.
        """
        place = choose_device(device)
        weights = _dtype(place, dtype, torch_dtype)
        components = pretrained.load_components(folder, place, offload, weights, on_loaded)
        return cls(
            components.models,
            class_names=components.class_names,
            defaults=components.defaults,
            text_encoder=components.text_encoder,
            latents=components.latents,
        )

    def save_pretrained(self, folder: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Write the pipeline in diffusers' layout (sampling.pretrained): model_index.json and a folder per component.

        `overwrite`: replace an earlier export. Files that no export wrote stay.
        """
        pretrained.save(self.components, folder, overwrite)

    def to(self, *places: Any, device: Any = None, dtype: SamplingPrecision | None = None) -> Self:
        """Move the networks to a device, to a dtype (see `from_run`), or both, with the arguments of `torch.Tensor.to`.

        Raises SamplingError for a missing device, an unsupported dtype, and for experts that are offloaded.
        """
        place, weights = arguments.destination(places, device, dtype)
        self.components = self.components.to(place, None if weights is None else dtype_of(weights))
        return self

    def progress_bar(self, iterable: Iterable[Any] | None = None, total: int | None = None) -> Any:
        """A tqdm bar with the settings of `set_progress_bar_config`. By default it shows only on a terminal."""
        config = {"disable": None, "tqdm_class": tqdm, **self._progress_bar_config}
        return config.pop("tqdm_class")(iterable, total=total, **config)

    def set_progress_bar_config(self, **config: Any) -> None:
        """Set tqdm's arguments for the bar of later calls, such as disable=True; `tqdm_class` takes its place."""
        self._progress_bar_config = config

    def __repr__(self) -> str:
        info, router = self.models.info, "no router" if self.models.router is None else "a router"
        shape = " x ".join(map(str, info.image_shape))
        return f"DDMPipeline({info.num_experts} experts, {router}, images of {shape}, {self.dtype} on {self.device})"

    @overload
    def __call__(self, prompt: Any = None, *, return_dict: Literal[True] = True, **others: Any) -> DDMOutput: ...

    @overload
    def __call__(self, prompt: Any = None, *, return_dict: Literal[False], **others: Any) -> tuple[Images]: ...

    def __call__(
        self,
        prompt: Prompt | Sequence[Prompt] | Text = None,
        *,
        class_labels: Label | Sequence[Label] = None,
        negative_prompt: Prompt | Sequence[Prompt] = None,
        num_images_per_prompt: int = 1,
        num_inference_steps: int | None = None,
        seeds: int | Sequence[int] | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        latents: Tensor | None = None,
        clusters: int | Sequence[int] | None = None,
        output_type: OutputType = "pil",
        return_dict: bool = True,
        batch_size: int = 256,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = TENSORS,
        **settings: Any,
    ) -> DDMOutput | tuple[Images]:
        """Sample images of `prompt` (texts, or names of classes) or of `class_labels` (names or numbers).

        In a list, "" and None are unconditional. `settings`: fields of SamplingSettings (strategy, guidance_scale,
        solver ...); a field that is left out or None takes the pipeline's default. `num_inference_steps` is diffusers'
        name of `steps`. `seeds`: one per image, or the first of consecutive seeds; by default they are drawn, from
        `generator` (one, or one per image) if given. An image depends only on its own seed, not on its batch.
        `latents` (B, C, H, W), standard normal, replace the noise of the seeds, which still choose experts.
        `negative_prompt`, for models of texts: guidance leads away from it instead of the empty prompt. `clusters`:
        one per prompt, for strategy oracle. `output_type`: "pil" gives L or RGB images, "pt" float32 (B, C, H, W) and
        "np" (B, H, W, C) in [0, 1], "latent" the models' own output.

        `callback_on_step_end(pipeline, step, t, {"latents": x_BCHW})` is called after each step of each batch, with t
        in [0, 1] and the images on the models' device. If it returns a dict with latents, these replace the images.
        It may set `_interrupt`: then unfinished images are returned as they are, and images not yet begun as noise.
        If `return_dict` is False, the result is a tuple of the images. Raises SamplingError for invalid arguments.
        """
        self._require_output(output_type)
        batch_size = arguments.count("batch_size", batch_size)
        names = tensor_inputs(callback_on_step_end, callback_on_step_end_tensor_inputs)
        if num_inference_steps is not None:
            settings["steps"] = num_inference_steps
        call = call_of(
            self.components,
            prompt,
            class_labels,
            negative_prompt=negative_prompt,
            num_images_per_prompt=num_images_per_prompt,
            seeds=seeds,
            generator=generator,
            latents=latents,
            clusters=clusters,
            settings={name: value for name, value in settings.items() if value is not None},
            known=arguments.names_of(self.__call__),
        )
        steps, num_images = call.settings.steps, len(call.seeds)
        self._interrupt, self._num_timesteps = False, steps
        order: list[int] = []
        results = []
        parts = call.parts(batch_size)
        with self.progress_bar(total=steps * len(parts)) as bar:
            on_step = StepEnds(self, callback_on_step_end, names, bar, num_images, steps)
            for rows in parts:
                models, request = call.request(rows)
                result = models.sample(request, on_step, lambda: self._interrupt)
                if output_type != "latent":
                    result = replace(result, images_BCHW=self._decoded(result.images_BCHW))
                results.append(result)
                order += rows
        result = joined(results, torch.tensor(order).argsort())
        images = images_as(output_type, result.images_BCHW)
        if not return_dict:
            return (images,)
        return DDMOutput(
            images,
            call.seeds,
            call.words,
            result.routing_SBK,
            time_grid(call.settings.times, steps)[:-1],
            result.num_expert_rows,
            result.num_router_rows,
            latent=output_type == "latent",
            clusters=result.clusters,
        )

    def _require_output(self, output_type: str) -> None:
        if output_type not in ("pil", "pt", "np", "latent"):
            raise SamplingError(f"unknown output_type {output_type!r}: use pil, pt, np or latent")
        channels = self.models.info.image_shape[0]
        if output_type != "latent" and self.components.latents is None and channels not in (1, 3):
            raise SamplingError(
                f"{channels} channels are no picture and there are no latents to decode them: use output_type latent"
            )

    def _decoded(self, images_BCHW: Tensor) -> Tensor:
        latents = self.components.latents
        if latents is None:
            return images_BCHW
        few = images_BCHW.to(self.models.device).split(MAX_DECODED)
        return torch.cat([latents.decode(latents_BCHW).cpu() for latents_BCHW in few])


def _dtype(device: str, dtype: SamplingPrecision | None, torch_dtype: SamplingPrecision | None) -> torch.dtype:
    if dtype is not None and torch_dtype is not None:
        raise SamplingError("dtype and torch_dtype are one thing: give one of them")
    given = torch_dtype if dtype is None else dtype
    return frozen_dtype(device) if given is None else dtype_of(given)
