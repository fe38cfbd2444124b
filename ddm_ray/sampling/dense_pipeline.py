"""An ordinary pipeline of diffusers for one dense model, the student or the monolith of a run.

An export has it beside the weights, in one file with all that it imports of ours (`single_file`), so none of these may
need more than torch, numpy and diffusers. Shapes: B images, N prompts or labels, CHW image.
"""

import inspect
import json
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from ddm_ray.core.condition import Condition, Text, join
from ddm_ray.core.guidance import guide, scale_within
from ddm_ray.core.names import SOLVER, STEPS, TIMES
from ddm_ray.core.solver_schedule import HISTORY, moved, schedule
from ddm_ray.core.solvers import SOLVERS, SolverName
from ddm_ray.core.times import time_grid
from ddm_ray.models.text_tokens import encode
from ddm_ray.sampling.noise import initial_noise, step_noise

MAX_DECODED = 8
"""Latents that the autoencoder decodes at once; it takes far more memory than they do."""


class DensePipeline(DiffusionPipeline):
    """Images of texts or class labels. What a call leaves out is as the run's own settings say, in `config`.

    There, no setting is a list, which diffusers would take for a component: `id2label` is names of classes by their
    numbers, and guidance acts at times in (`guidance_low`, `guidance_high`].
    """

    model_cpu_offload_seq = "text_encoder->text_encoder_2->transformer->vae"
    _optional_components = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae"]  # noqa: RUF012
    _callback_tensor_inputs = ["latents"]  # noqa: RUF012

    def __init__(
        self,
        transformer: ModelMixin,
        text_encoder: Any,
        tokenizer: Any,
        text_encoder_2: Any,
        tokenizer_2: Any,
        vae: Any,
        num_classes: int | None = None,
        id2label: dict[str, str] | None = None,
        knows_null: bool = True,
        text_tokens: int | None = None,
        text_tokens_2: int | None = None,
        latent_scale: float = 1.0,
        latent_shift: float = 0.0,
        solver: str = SOLVER,
        times: str = TIMES,
        steps: int = STEPS,
        guidance_scale: float = 1.0,
        guidance_low: float = 0.0,
        guidance_high: float = 1.0,
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
            id2label=id2label or {},
            knows_null=knows_null,
            text_tokens=text_tokens,
            text_tokens_2=text_tokens_2,
            latent_scale=latent_scale,
            latent_shift=latent_shift,
            solver=solver,
            times=times,
            steps=steps,
            guidance_scale=guidance_scale,
            guidance_low=guidance_low,
            guidance_high=guidance_high,
        )

    def save_config(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **options: Any) -> None:
        """Save the configuration, and before it the code, as `save_pretrained` needs it: diffusers saves none."""
        for part, source in self._code().items():
            copy = os.path.join(save_directory, part, os.path.basename(source))
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            if not os.path.exists(copy):
                shutil.copyfile(source, copy)
        super().save_config(save_directory, push_to_hub=push_to_hub, **options)

    def to_json_string(self) -> str:
        """The configuration. It names the files of the code, so that a pipeline that was saved again can be opened."""
        index = json.loads(super().to_json_string())
        for part, source in self._code().items():
            name = part or "_class_name"
            index[name] = [os.path.basename(source).removesuffix(".py"), index[name][-1] if part else index[name]]
        return f"{json.dumps(index, indent=2, sort_keys=True)}\n"

    def _code(self) -> dict[str, str]:
        """The files of the code of this class and of the transformer's, by folder; none within ddm-ray itself."""
        network = getattr(self.transformer, "_orig_mod", self.transformer)  # as compiled ones have it
        kinds = {"": type(self), "transformer": type(network)}
        inside = type(self).__module__ == "ddm_ray.sampling.dense_pipeline"
        return {} if inside else {part: inspect.getfile(kind) for part, kind in kinds.items()}

    @property
    def num_timesteps(self) -> int:
        """Number of steps of the last call."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """True if the last call is to end, or has ended, before its next step: set `_interrupt` for that."""
        return self._interrupt

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: int | str | Sequence[int | str | None] | None = None,
        *,
        num_images_per_prompt: int = 1,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        solver: SolverName | None = None,
        seeds: Sequence[int] | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: Literal["pil", "np", "pt", "latent"] = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, float, dict[str, Any]], dict[str, Any]] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> Any:
        """ImagePipelineOutput of N times `num_images_per_prompt` images, those of a prompt side by side.

        `class_labels` are names or numbers of classes, None the null one. Noise is `latents` (B, C, H, W), standard
        normal; else what ddm-ray's own sampling begins at with these `seeds`, one an image; else drawn by `generator`.
        `callback_on_step_end(self, step, t, tensors)` is called after each step, which began at time t; `tensors` are
        those that `callback_on_step_end_tensor_inputs` names, latents (B, C, H, W), and what it returns is taken up.

        ValueError for what the model doesn't know, and for another number of seeds or latents than of images.
        """
        if isinstance(callback_on_step_end, PipelineCallback | MultiPipelineCallbacks):
            callback_on_step_end_tensor_inputs = callback_on_step_end.tensor_inputs
        if unknown := set(callback_on_step_end_tensor_inputs) - {*self._callback_tensor_inputs}:
            raise ValueError(f"no tensor {min(unknown)!r} for callbacks: use some of {self._callback_tensor_inputs}")
        settings = self.config
        most = settings.guidance_scale if guidance_scale is None else guidance_scale
        steps = settings.steps if num_inference_steps is None else num_inference_steps
        condition, null = self._conditions(prompt, class_labels, num_images_per_prompt, most)
        x_BCHW = self._noise(len(condition), seeds, generator, latents)
        history, usable, scale, t_start = (torch.zeros_like(x_BCHW),) * HISTORY, 0, most, 1.0
        self._interrupt, self._num_timesteps = False, steps
        for row in self.progress_bar(schedule(SOLVERS[solver or settings.solver], time_grid(settings.times, steps))):
            scale_before = scale
            if row["starts"]:
                if self._interrupt:
                    break
                t_start = float(row["t"])
                scale = scale_within((settings.guidance_low, settings.guidance_high), t_start, most)
            point_BCHW = moved(x_BCHW, history, row["lean"].tolist())
            velocity_BCHW = self._velocity(point_BCHW, float(row["t"]), condition, null, scale)
            # Two fields don't extrapolate: where guidance sets in or ends, history restarts.
            usable = usable if scale == scale_before else 0
            x_BCHW = moved(x_BCHW * float(row["keep"]), (velocity_BCHW, *history), row["moves"][usable].tolist())
            if row["noise"]:
                drawn_BCHW = self._step_noise(len(x_BCHW), seeds, generator, int(row["step"]))
                x_BCHW = moved(x_BCHW, [drawn_BCHW], [float(row["noise"])])
            history, usable = (velocity_BCHW, *history[:-1]), min(usable + 1, HISTORY)
            if row["ends"] and callback_on_step_end is not None:
                tensors = dict.fromkeys(callback_on_step_end_tensor_inputs, x_BCHW)
                x_BCHW = callback_on_step_end(self, int(row["step"]), t_start, tensors).pop("latents", x_BCHW)
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

    def _step_noise(self, count: int, seeds: Sequence[int] | None, generator: Any, step: int) -> Tensor:
        shape = tuple(self.transformer.config.image_shape)
        if seeds is None:
            drawn_BCHW = randn_tensor((count, *shape), generator=generator, dtype=torch.float32)
        else:
            drawn_BCHW = step_noise(seeds, [step] * count, shape)
        return drawn_BCHW.to(self._execution_device, torch.float32)

    def _conditions(self, prompt: Any, labels: Any, each: int, scale: float) -> tuple[Condition, Condition | None]:
        """Conditions of all images, and the null condition of as many where guidance, or its absence, asks for it."""
        condition: Condition
        nothing: Condition
        if self.text_encoder is not None:
            if labels is not None or prompt is None:
                raise ValueError("the model is conditioned on texts: give `prompt`, and no class_labels")
            prompts = [prompt] if isinstance(prompt, str) else list(prompt)
            # At once, so that models that are elsewhere until they are called come only once.
            texts = self._texts([*prompts, ""])
            condition, nothing = texts[:-1], texts[-1:]
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
        names, count = self.config.id2label, self.config.num_classes or 0
        if label is None and (self.config.knows_null or not count):
            return count
        for number, name in names.items():
            if name == label:
                return int(number)
        if isinstance(label, int) and 0 <= label < count:
            return label
        known = ", ".join(map(repr, names.values())) or f"0 to {count - 1}"
        raise ValueError(f"no class {label!r}: use one of {known}")

    def _pictures(self, x_BCHW: Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return x_BCHW
        if self.vae is not None:
            scaled_BCHW = (x_BCHW / self.config.latent_scale + self.config.latent_shift).to(self.vae.dtype)
            x_BCHW = torch.cat([self.vae.decode(part).sample for part in scaled_BCHW.split(MAX_DECODED)])
        return VaeImageProcessor(do_resize=False).postprocess(x_BCHW.float(), output_type)
