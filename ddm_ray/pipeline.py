"""DDMPipeline: images from a finished run in three lines, in the manner of a diffusers pipeline. No Ray.

Shapes: B images, C channels, H, W, S steps, K experts.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from pydantic import ValidationError
from torch import Tensor

from ddm_ray.config import Precision, SamplingSettings, invalid_fields
from ddm_ray.core.condition import Text
from ddm_ray.core.routing import Oracle, parse_strategy
from ddm_ray.core.times import time_grid
from ddm_ray.errors import SamplingError
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder
from ddm_ray.sampling import arguments, paris, pretrained
from ddm_ray.sampling.arguments import PromptConditions
from ddm_ray.sampling.batches import joined
from ddm_ray.sampling.components import Components
from ddm_ray.sampling.offload import Offload
from ddm_ray.sampling.output import DDMOutput, OutputType, images_as
from ddm_ray.sampling.paris_weights import Reading, TimeDirection
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import ModelKind, Models, load_models, row_networks, sampling_settings
from ddm_ray.spelling import meant
from ddm_ray.storage.run import Run

Label = int | str | None
Prompt = str | None
StepCallback = Callable[["DDMPipeline", int, float, dict[str, Tensor]], object]

MAX_DECODED = 8
"""Latents that an autoencoder decodes at once; it takes far more memory than they do."""


class DDMPipeline:
    """Samples from a mixture of experts, or from one model, in this process.

    `class_names`: of labels 0, 1, ...; `defaults`: settings that a call leaves out; `text_encoder` for models of texts,
    `latents` for models of latents. Raises ExpertCountError, SamplingError for what doesn't fit together.
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

    @property
    def models(self) -> Models:
        return self.components.models

    @classmethod
    def from_run(
        cls,
        run: str | os.PathLike[str] | Run,
        device: str = "cpu",
        model: ModelKind = "mixture",
        offload: Offload | None = None,
        precision: Precision = "fp32",
    ) -> "DDMPipeline":
        """A run's finished models, every byte verified; without its router if that isn't finished yet.

        `offload` keeps two experts on the device, the others in files ("disk") or in the "host"'s memory. `precision`
        is the networks', "bf16" on a GPU mostly; the images' own stays fp32. Raises RunError, MissingArtifact,
        CorruptArtifact, and ConfigError for a text encoder or autoencoder it can't find.
        """
        if model not in get_args(ModelKind):
            raise SamplingError(f"unknown model {model!r}: use {', '.join(get_args(ModelKind))}")
        _require_device(device)
        run = run if isinstance(run, Run) else Run.open(os.fspath(run))
        data, models = run.config.data, load_models(run, model, device, offload, precision)
        known, encoder, latents = row_networks(run), None, None
        if data.text is not None:
            encoder = TextEncoder.from_config(data.text, known.get("text encoder")).to(device)
        if data.latents is not None:
            latents = Latents.from_config(data.latents, known.get("autoencoder")).to(device)
        defaults = sampling_settings(run, model)
        return cls(
            models, class_names=run.named.data.class_names, defaults=defaults, text_encoder=encoder, latents=latents
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: str = "cpu",
        offload: Offload | None = None,
        *,
        precision: Precision = "fp32",
        names: Mapping[str, str | None] | None = None,
        time: TimeDirection | None = None,
    ) -> "DDMPipeline":
        """From a folder that `save_pretrained` wrote, or from a checkpoint laid out as Paris's (sampling.paris).

        `precision`: see `from_run`. `names` and `time` say how to read the latter, and it alone
        (`paris_weights.Reading`). Raises MissingArtifact, RunError, CorruptArtifact, TruncatedWeights.
        """
        _require_device(device)
        if not pretrained.is_ours(folder) and paris.is_paris(folder):
            reading = Reading(names or {}, time or "noise-at-1")
            return cls._of(paris.load(folder, device, offload, reading, precision))
        if names is not None or time is not None:
            raise SamplingError(f"{folder}: names and time are for a checkpoint in Paris's layout: leave them out")
        return cls._of(pretrained.load(folder, device, offload, precision))

    @classmethod
    def _of(cls, components: Components) -> "DDMPipeline":
        return cls(
            components.models,
            class_names=components.class_names,
            defaults=components.defaults,
            text_encoder=components.text_encoder,
            latents=components.latents,
        )

    def save_pretrained(self, folder: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Write all of it in diffusers' layout (sampling.pretrained): model_index.json, a folder a component."""
        pretrained.save(self.components, folder, overwrite)

    def __call__(
        self,
        prompt: Prompt | Sequence[Prompt] | Text = None,
        *,
        class_labels: Label | Sequence[Label] = None,
        num_images_per_prompt: int = 1,
        num_inference_steps: int | None = None,
        seeds: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        clusters: int | Sequence[int] | None = None,
        output_type: OutputType = "pil",
        batch_size: int = 256,
        callback_on_step_end: StepCallback | None = None,
        progress: Callable[[float, str], None] | None = None,
        **settings: Any,
    ) -> DDMOutput:
        """Images of `prompt` (texts; or names of classes, where models know classes) or of `class_labels` (names
        or numbers); "" or None among several is unconditional.

        `settings`: the fields of SamplingSettings (strategy, guidance_scale, solver ...), the pipeline's defaults
        where they are left out or None; `num_inference_steps` is diffusers' name of `steps`. `seeds`: one an image, or
        the first of consecutive ones; else drawn, from `generator` if there is one. An image depends on its own seed
        alone, not on its batch. `clusters`: one a prompt, for strategy oracle. "pil" gives L or RGB images, "pt"
        float32 (B, C, H, W) and "np" (B, H, W, C) in [0, 1], "latent" the models' own output.
        `callback_on_step_end(pipeline, step, t, {"latents": x_BCHW})` watches each step of each batch, on the models'
        device; its result is ignored. `progress` is called with the share that is done and a note. SamplingError for
        what can't be met.
        """
        self._require_output(output_type)
        batch_size = arguments.count("batch_size", batch_size)
        num_each = arguments.count("num_images_per_prompt", num_images_per_prompt)
        conditions = self._conditions(prompt, class_labels)
        prompt_of = [row for row in range(len(conditions)) for _ in range(num_each)]
        seed_of = arguments.seeds(seeds, generator, len(prompt_of))
        if num_inference_steps is not None:
            settings["steps"] = num_inference_steps
        changes = {name: value for name, value in settings.items() if value is not None}
        chosen, cluster_B = self._routed(changes, clusters, len(conditions))

        def on_step(step: int, t: float, x_BCHW: Tensor) -> None:
            assert callback_on_step_end is not None
            callback_on_step_end(self, step, t, {"latents": x_BCHW})

        results = []
        for begin in range(0, len(prompt_of), batch_size):
            rows, end = prompt_of[begin : begin + batch_size], min(begin + batch_size, len(prompt_of))
            own_B = None if cluster_B is None else cluster_B[rows]
            request = SampleRequest(seed_of[begin:end], conditions.of(rows), chosen, own_B)
            result = self.models.sample(request, on_step if callback_on_step_end else None)
            if output_type != "latent":
                result = replace(result, images_BCHW=self._decoded(result.images_BCHW))
            results.append(result)
            if progress:
                progress(end / len(prompt_of), f"{end} of {len(prompt_of)} images")
        result = joined(results)
        return DDMOutput(
            images_as(output_type, result.images_BCHW),
            seed_of,
            tuple(conditions.words[row] for row in prompt_of),
            result.routing_SBK,
            time_grid(chosen.times, chosen.steps)[:-1],
            result.num_expert_rows,
            result.num_router_rows,
            latent=output_type == "latent",
        )

    def label(self, label: Label) -> int:
        """The models' number of a class given by name or number; None is the null condition."""
        names, count = self.components.class_names, self.models.info.num_classes or 0
        if label is None:
            return count
        if isinstance(label, str) and label in names:
            return names.index(label)
        number = arguments.integer(label)
        if number is not None and 0 <= number < count:
            return number
        known = f"a name ({', '.join(names[:12])}{', ...' if len(names) > 12 else ''}) or " if names else ""
        raise SamplingError(
            f"unknown class {label!r}: use {known}a number from 0 to {count - 1}{meant(str(label), names)}"
        )

    def _require_output(self, output_type: str) -> None:
        if output_type not in ("pil", "pt", "np", "latent"):
            raise SamplingError(f"unknown output_type {output_type!r}: use pil, pt, np or latent")
        channels = self.models.info.image_shape[0]
        if output_type != "latent" and self.components.latents is None and channels not in (1, 3):
            raise SamplingError(
                f"{channels} channels are no picture and there are no latents to decode them: use output_type latent"
            )

    def _conditions(
        self, prompt: Prompt | Sequence[Prompt] | Text, class_labels: Label | Sequence[Label]
    ) -> PromptConditions:
        """Conditions that the prompts or labels ask for."""
        info = self.models.info
        texts = info.num_classes is None
        if (prompt is None) == (class_labels is None):
            raise SamplingError(f"give either prompt{'' if texts else ' or class_labels'}: one, or a list of them")
        if isinstance(prompt, Text):
            return PromptConditions([""] * len(prompt), prompt.to("cpu"))
        if texts:
            if prompt is None:
                raise SamplingError("these models know texts, not classes: give prompt in place of class_labels")
            words = arguments.texts(prompt)
            if self.components.text_encoder is None:
                raise SamplingError(
                    "this pipeline has no text_encoder: give it one, or a prompt that is encoded (Text)"
                )
            return PromptConditions(words, self.components.text_encoder)
        labels = arguments.listed(class_labels if prompt is None else prompt)
        if not labels:
            raise SamplingError(f"{'class_labels' if prompt is None else 'prompt'} is empty: give at least one class")
        if prompt is not None:
            if any(not isinstance(label, str | None) for label in labels):
                raise SamplingError("a prompt is the name of a class here: give numbers as class_labels")
            labels = [label or None for label in labels]
        if None in labels:
            info.null(1)
        named = ["" if label is None else str(label) for label in labels]
        return PromptConditions(named, torch.tensor([self.label(label) for label in labels], dtype=torch.int64))

    def _routed(
        self, changes: dict[str, Any], clusters: int | Sequence[int] | None, num_prompts: int
    ) -> tuple[SamplingSettings, Tensor | None]:
        """The call's settings and its prompts' clusters, int64. SamplingError for a strategy that lacks its router."""
        info = self.models.info
        try:
            settings = self.components.defaults.changed(**changes)
        except ValidationError as error:
            raise SamplingError(invalid_fields(error)) from None
        if self.models.router is None and info.num_experts == 1:
            if changes.get("strategy", "once") != "once" or clusters is not None:
                raise SamplingError("a single network has no experts to choose from: leave out strategy and clusters")
            # The one expert is known beforehand: no table and no router has to be asked for it.
            return settings.changed(strategy="oracle"), torch.zeros(num_prompts, dtype=torch.int64)
        name = settings.strategy or "once"
        strategy = parse_strategy(name, info.num_experts)
        if self.models.router is None:
            without_table = info.num_classes is None or info.prior_CK is None
            if strategy.when != "start" or (name == "once" and without_table):
                others = "oracle" if without_table else "once or oracle"
                raise SamplingError(f"strategy {name!r} needs the router, which isn't there: use {others}")
        if isinstance(strategy, Oracle) is (clusters is None):
            raise SamplingError(f"strategy oracle, and no other, needs clusters: the strategy is {name}")
        return settings, None if clusters is None else arguments.clusters(clusters, num_prompts, info.num_experts)

    def _decoded(self, images_BCHW: Tensor) -> Tensor:
        latents = self.components.latents
        if latents is None:
            return images_BCHW
        few = images_BCHW.to(self.models.device).split(MAX_DECODED)
        return torch.cat([latents.decode(latents_BCHW).cpu() for latents_BCHW in few])


def _require_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on how it was built
        reason = str(error).splitlines()[0]
        raise SamplingError(
            f"device {device!r} isn't there: use cpu, or cuda on a machine with a GPU ({reason})"
        ) from None
