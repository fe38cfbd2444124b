"""An ordinary pipeline of diffusers for one dense model, the student or the monolith of a run.

An export has this file beside the weights, so neither it nor what it imports may need more than torch, numpy and
diffusers. Shapes: B images, N prompts or labels, CHW image.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from ddm_ray.core.condition import Condition, Text, join
from ddm_ray.core.guidance import guide, scale_within
from ddm_ray.core.solvers import SOLVERS, moved, schedule
from ddm_ray.core.times import time_grid
from ddm_ray.models.text_tokens import encode
from ddm_ray.sampling.noise import initial_noise

MAX_DECODED = 8
"""Latents that the autoencoder decodes at once; it takes far more memory than they do."""


class DensePipeline(DiffusionPipeline):
    """Images of texts or class labels. What a call leaves out is as the run's own settings say, in `config`."""

    model_cpu_offload_seq = "text_encoder->text_encoder_2->transformer->vae"
    _optional_components = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae"]  # noqa: RUF012

    def __init__(
        self,
        transformer: ModelMixin,
        text_encoder: Any,
        tokenizer: Any,
        text_encoder_2: Any,
        tokenizer_2: Any,
        vae: Any,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        knows_null: bool = True,
        text_tokens: int | None = None,
        text_tokens_2: int | None = None,
        latent_scale: float = 1.0,
        latent_shift: float = 0.0,
        solver: str = "heun",
        times: str = "uniform",
        steps: int = 50,
        guidance_scale: float = 1.0,
        guidance_interval: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            vae=vae,
        )
        self.register_to_config(
            num_classes=num_classes,
            class_names=list(class_names or ()),
            knows_null=knows_null,
            text_tokens=text_tokens,
            text_tokens_2=text_tokens_2,
            latent_scale=latent_scale,
            latent_shift=latent_shift,
            solver=solver,
            times=times,
            steps=steps,
            guidance_scale=guidance_scale,
            guidance_interval=list(guidance_interval or (0.0, 1.0)),
        )

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: int | str | Sequence[int | str | None] | None = None,
        *,
        num_images_per_prompt: int = 1,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        solver: Literal["euler", "heun", "midpoint", "ab2"] | None = None,
        seeds: Sequence[int] | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: Literal["pil", "np", "pt", "latent"] = "pil",
        return_dict: bool = True,
    ) -> Any:
        """ImagePipelineOutput of N times `num_images_per_prompt` images, those of a prompt side by side.

        `class_labels` are names or numbers of classes, None the null one. Noise is `latents` (B, C, H, W), standard
        normal; else what ddm-ray's own sampling begins at with these `seeds`, one an image; else drawn by `generator`.
        ValueError for what the model doesn't know, and for another number of seeds or latents than of images.
        """
        settings = self.config
        most = settings.guidance_scale if guidance_scale is None else guidance_scale
        steps = settings.steps if num_inference_steps is None else num_inference_steps
        condition, null = self._conditions(prompt, class_labels, num_images_per_prompt, most)
        x_BCHW = self._noise(len(condition), seeds, generator, latents)
        last_BCHW, scale = torch.zeros_like(x_BCHW), most
        for row in self.progress_bar(schedule(SOLVERS[solver or settings.solver], time_grid(settings.times, steps))):
            scale_before = scale
            if row["starts"]:
                scale = scale_within(settings.guidance_interval, float(row["t"]), most)
            point_BCHW = moved(x_BCHW, last_BCHW, float(row["lean"]))
            velocity_BCHW = self._velocity(point_BCHW, float(row["t"]), condition, null, scale)
            # Two fields don't extrapolate: where guidance sets in or ends, history begins anew.
            this, last = ("this", "last") if scale == scale_before or row["step"] == 0 else ("fresh", "stale")
            x_BCHW = moved(moved(x_BCHW, velocity_BCHW, float(row[this])), last_BCHW, float(row[last]))
            last_BCHW = velocity_BCHW
        images = self._pictures(x_BCHW, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _velocity(self, x_BCHW: Tensor, t: float, condition: Condition, null: Condition | None, scale: float) -> Tensor:
        """The guided velocity; both branches are one batch."""
        if null is None or scale == 1:
            return self._of_network(x_BCHW, t, condition)
        if scale == 0:
            return self._of_network(x_BCHW, t, null)
        both_BCHW = self._of_network(x_BCHW.repeat(2, 1, 1, 1), t, join([condition, null]))
        return guide(both_BCHW[: len(x_BCHW)], both_BCHW[len(x_BCHW) :], scale)

    def _of_network(self, x_BCHW: Tensor, t: float, condition: Condition) -> Tensor:
        given: dict[str, Any] = {"class_labels": condition}
        if isinstance(condition, Text):
            given = {"encoder_hidden_states": condition.tokens_BLE, "encoder_attention_mask": condition.mask_BL}
            given["pooled_projections"] = condition.pooled_BP
        t_B = x_BCHW.new_full((len(x_BCHW),), t)
        # Times and the trajectory stay float32, whatever the network computes in.
        return self.transformer(x_BCHW, t_B, **given, return_dict=False)[0].to(x_BCHW.dtype)

    def _noise(self, count: int, seeds: Sequence[int] | None, generator: Any, latents: Tensor | None) -> Tensor:
        shape = tuple(self.transformer.config.image_shape)
        for name, given in (("seeds", seeds), ("latents", latents)):
            if given is not None and len(given) != count:
                raise ValueError(f"{len(given)} {name} for {count} images: give one an image")
        if latents is None and seeds is not None:
            latents = initial_noise(seeds, shape)
        if latents is None:
            latents = randn_tensor((count, *shape), generator=generator, dtype=torch.float32)
        if latents.shape[1:] != shape:
            raise ValueError(f"latents are of shape {tuple(latents.shape[1:])}: the model's are {shape}")
        return latents.to(self._execution_device, torch.float32)

    def _conditions(self, prompt: Any, labels: Any, each: int, scale: float) -> tuple[Condition, Condition | None]:
        """Conditions of all images, and the null condition of as many where guidance, or its absence, asks for it."""
        condition: Condition
        nothing: Condition
        if self.text_encoder is not None:
            if labels is not None or prompt is None:
                raise ValueError("the model is conditioned on texts: give `prompt`, and no class_labels")
            prompts = [prompt] if isinstance(prompt, str) else list(prompt)
            condition, nothing = self._texts(prompts), self._texts([""])
        else:
            if prompt is not None:
                raise ValueError("the model knows no texts: give class_labels, by name or number")
            many = labels if isinstance(labels, list | tuple) else [labels]
            numbers = [self._label(label) for label in many]
            condition, nothing = torch.tensor(numbers), torch.tensor([self.config.num_classes or 0])
        rows = torch.arange(len(condition)).repeat_interleave(each)
        if scale == 1 or (not self.config.num_classes and self.text_encoder is None):
            return condition[rows].to(self._execution_device), None
        if not self.config.knows_null:
            raise ValueError("the model was trained without a null condition: use guidance_scale 1")
        null = nothing[torch.zeros_like(rows)]
        return condition[rows].to(self._execution_device), null.to(self._execution_device)

    def _texts(self, prompts: list[str]) -> Text:
        text = encode(self.tokenizer, self.text_encoder, prompts, self.config.text_tokens)
        if self.text_encoder_2 is None:
            return text
        pooled = encode(self.tokenizer_2, self.text_encoder_2, prompts, self.config.text_tokens_2).pooled_BP
        return Text(text.tokens_BLE, text.mask_BL, pooled)

    def _label(self, label: int | str | None) -> int:
        names, count = self.config.class_names, self.config.num_classes or 0
        if label is None and (self.config.knows_null or not count):
            return count
        if label in names:
            return names.index(label)
        if isinstance(label, int) and 0 <= label < count:
            return label
        known = ", ".join(map(repr, names)) or f"0 to {count - 1}"
        raise ValueError(f"no class {label!r}: use one of {known}")

    def _pictures(self, x_BCHW: Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return x_BCHW
        if self.vae is not None:
            scaled_BCHW = (x_BCHW / self.config.latent_scale + self.config.latent_shift).to(self.vae.dtype)
            x_BCHW = torch.cat([self.vae.decode(part).sample for part in scaled_BCHW.split(MAX_DECODED)])
        return VaeImageProcessor(do_resize=False).postprocess(x_BCHW.float(), output_type)
