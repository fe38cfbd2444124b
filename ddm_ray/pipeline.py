"""DDMPipeline: images from a finished run in three lines, in the manner of a diffusers pipeline. No Ray.

Shapes: B images, C channels, H, W, S steps, K experts.
"""

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ddm_ray.config import SampleConfig
from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.routing import parse_strategy
from ddm_ray.core.times import time_grid
from ddm_ray.errors import SamplingError
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder
from ddm_ray.sampling import paris, pretrained
from ddm_ray.sampling.checkpoint import Models, batches, joined, load_models
from ddm_ray.sampling.components import Components, Offload
from ddm_ray.sampling.output import DDMOutput, OutputType, images_as
from ddm_ray.sampling.paris_weights import Reading, Time
from ddm_ray.sampling.request import Sampled, SampleRequest, validate
from ddm_ray.storage.run import Run

Label = int | str | None
Prompt = str | None
StepCallback = Callable[["DDMPipeline", int, float, dict[str, Tensor]], object]

MOST_DECODED = 8
"""Images that an autoencoder decodes at once: it takes far more memory than the latents do."""


class DDMPipeline:
    """Samples from a mixture of experts, or from one model, in this process.

    `class_names`: of labels 0, 1, ...; `defaults`: settings that a call leaves out; `text_encoder` for models of
    texts, `latents` for models of latents. Raises ExpertCountError, SamplingError for what doesn't fit together.
    """

    def __init__(
        self,
        models: Models,
        *,
        class_names: Sequence[str] = (),
        defaults: SampleConfig | None = None,
        text_encoder: TextEncoder | None = None,
        latents: Latents | None = None,
    ):
        self.components = Components(models, tuple(class_names), defaults or SampleConfig(), text_encoder, latents)

    @property
    def models(self) -> Models:
        return self.components.models

    @classmethod
    def from_run(
        cls,
        run: str | Run,
        device: str = "cpu",
        model: Literal["mixture", "monolith"] = "mixture",
        offload: Offload | None = None,
    ) -> "DDMPipeline":
        """A run's finished models, every byte verified; without its router if that isn't finished yet.

        `offload` keeps two experts on the device, the others in files ("disk") or in the "host"'s memory. Raises
        RunError, MissingArtifact, CorruptArtifact, and ConfigError for a text encoder or autoencoder it can't find.
        """
        if model not in ("mixture", "monolith"):
            raise SamplingError(f"unknown model {model!r}: use mixture or monolith")
        _require_offload(offload)
        run = run if isinstance(run, Run) else Run.open(run)
        data, models = run.config.data, load_models(run, model, device, offload)
        encoder = None if data.text is None else TextEncoder.from_config(data.text).to(device)
        latents = None if data.latents is None else Latents.from_config(data.latents).to(device)
        if encoder is not None:
            models = replace(models, info=replace(models.info, null_text=encoder.null().to("cpu")))
        names, defaults = data.class_names, run.config.sample.model_copy(update={"strategy": run.strategy()})
        return cls(models, class_names=names, defaults=defaults, text_encoder=encoder, latents=latents)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: str = "cpu",
        offload: Offload | None = None,
        *,
        names: Mapping[str, str | None] | None = None,
        time: Time = "noise-at-1",
    ) -> "DDMPipeline":
        """From a folder that `save_pretrained` wrote, or from a checkpoint laid out as Paris's (sampling.paris).

        `names` and `time` say how to read the latter (`paris_weights.Reading`). Raises MissingArtifact, RunError,
        CorruptArtifact, TruncatedWeights.
        """
        _require_offload(offload)
        if not pretrained.is_ours(folder) and paris.is_paris(folder):
            return cls._of(paris.load(folder, device, offload, Reading(names or {}, time)))
        return cls._of(pretrained.load(folder, device, offload))

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
        guidance_scale: float | None = None,
        strategy: str | None = None,
        solver: str | None = None,
        times: str | None = None,
        guidance_interval: tuple[float, float] | None = None,
        guidance: Literal["mixture", "per-expert"] | None = None,
        seeds: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        clusters: int | Sequence[int] | None = None,
        output_type: OutputType = "pil",
        batch_size: int = 256,
        callback_on_step_end: StepCallback | None = None,
        progress: Callable[[float, str], None] | None = None,
    ) -> DDMOutput:
        """Images of `prompt` (texts; or names of classes, where models know classes) or of `class_labels` (names
        or numbers); "" or None among several is unconditional. What is None is the pipeline's own setting.

        `seeds`: one an image, or the first of consecutive ones; else drawn, from `generator` if there is one. An
        image depends on its own seed alone, not on its batch. `clusters`: a prompt's own (strategy oracle).
        "pil" gives L or RGB images, "pt" float32 (B, C, H, W) and "np" (B, H, W, C) in [0, 1], "latent" what the
        models paint, as it is. `callback_on_step_end(pipeline, step, t, {"latents": x_BCHW})` watches each step of
        each batch; what it returns is ignored. `progress` is called with the share that is done and a note.
        Raises SamplingError for what can't be met.
        """
        if output_type not in ("pil", "pt", "np", "latent"):
            raise SamplingError(f"unknown output_type {output_type!r}: use pil, pt, np or latent")
        for name, number in (("batch_size", batch_size), ("num_images_per_prompt", num_images_per_prompt)):
            if number < 1:
                raise SamplingError(f"{name} is {number}: use 1 or more")
        condition, prompts = self._condition(prompt, class_labels)
        index = torch.arange(len(prompts)).repeat_interleave(num_images_per_prompt)
        cluster_B = None if clusters is None else torch.as_tensor(clusters, dtype=torch.int64).expand(len(prompts))
        wanted: dict[str, Any] = {
            "steps": num_inference_steps,
            "guidance_scale": guidance_scale,
            "solver": solver,
            "times": times,
            "guidance_interval": guidance_interval,
            "guidance": guidance,
        }
        defaults = self.components.defaults
        request = SampleRequest(
            seeds=_seeds(seeds, generator, len(index)),
            condition=condition[index],
            cluster_B=None if cluster_B is None else cluster_B[index],
            strategy=strategy or defaults.strategy or "once",
            **{name: getattr(defaults, name) if value is None else value for name, value in wanted.items()},
        )
        request = self._routed(request, strategy)
        validate(request, self.models.info)
        sampled = self._sampled(request, output_type, batch_size, callback_on_step_end, progress)
        return DDMOutput(
            images_as(output_type, sampled.images_BCHW),
            request.seeds,
            tuple(prompts[row] for row in index.tolist()),
            sampled.routing_SBK,
            time_grid(request.times, request.steps)[:-1],
            sampled.num_expert_rows,
            sampled.num_router_rows,
            latent=output_type == "latent",
        )

    def label(self, label: Label) -> int:
        """The models' number of a class given by name or number; None is the null condition."""
        names, count = self.components.class_names, self.models.info.num_classes or 0
        if label is None:
            return count
        if isinstance(label, str) and label in names:
            return names.index(label)
        if isinstance(label, int | np.integer) and 0 <= label < count:
            return int(label)
        known = f"a name ({', '.join(names[:12])}{', ...' if len(names) > 12 else ''}) or " if names else ""
        raise SamplingError(f"unknown class {label!r}: use {known}a number from 0 to {count - 1}")

    def _condition(
        self, prompt: Prompt | Sequence[Prompt] | Text, class_labels: Label | Sequence[Label]
    ) -> tuple[Condition, list[str]]:
        """The condition of each prompt or label, on the CPU, and what to call it."""
        texts = self.models.info.num_classes is None
        if (prompt is None) == (class_labels is None):
            raise SamplingError(f"give either prompt{'' if texts else ' or class_labels'}: one, or a list of them")
        if isinstance(prompt, Text):
            return prompt.to("cpu"), [""] * len(prompt)
        if not texts:
            given = class_labels if prompt is None else prompt
            labels: list[Any] = [given]
            if isinstance(given, Iterable) and not isinstance(given, str):
                labels = list(given)
            if prompt is not None:
                if any(not isinstance(label, str | None) for label in labels):
                    raise SamplingError("a prompt is the name of a class here: give numbers as class_labels")
                labels = [label or None for label in labels]
            named = ["" if label is None else str(label) for label in labels]
            return torch.tensor([self.label(label) for label in labels], dtype=torch.int64), named
        if prompt is None:
            raise SamplingError("these models know texts, not classes: give prompt in place of class_labels")
        prompts = [prompt] if isinstance(prompt, str) else [one or "" for one in prompt]
        if not prompts:
            raise SamplingError("prompt is empty: give at least one text")
        if self.components.text_encoder is None:
            raise SamplingError("this pipeline has no text_encoder: give it one, or a prompt that is encoded (Text)")
        return self.components.text_encoder.encode(prompts).to("cpu"), prompts

    def _routed(self, request: SampleRequest, wanted: str | None) -> SampleRequest:
        """The request with what a single model makes of a strategy. SamplingError for one that lacks its router."""
        info = self.models.info
        if self.models.router is not None:
            return request
        if info.num_experts == 1:
            if wanted not in (None, "once"):
                raise SamplingError(f"strategy {wanted!r}: the monolith has no experts to choose from; leave it out")
            # The one expert is known beforehand: no table and no router has to be asked for it.
            cluster_B = torch.zeros(len(request.seeds), dtype=torch.int64)
            return replace(request, strategy="oracle", cluster_B=cluster_B)
        texts = info.num_classes is None
        if parse_strategy(request.strategy, info.num_experts).when != "start" or (request.strategy == "once" and texts):
            others = "oracle" if texts else "once or oracle"
            raise SamplingError(f"strategy {request.strategy!r} needs the router, which isn't there: use {others}")
        return request

    def _sampled(
        self,
        request: SampleRequest,
        output_type: OutputType,
        batch_size: int,
        callback: StepCallback | None,
        progress: Callable[[float, str], None] | None,
    ) -> Sampled:
        """All batches; latents decoded, unless they are what is wanted."""

        def on_step(step: int, t: float, x_BCHW: Tensor) -> None:
            assert callback is not None
            callback(self, step, t, {"latents": x_BCHW})

        latents = self.components.latents if output_type != "latent" else None
        parts: list[Sampled] = []
        done = 0
        for batch in batches(request, batch_size):
            part = self.models.sample(batch, on_step if callback else None)
            if latents is not None:
                few = part.images_BCHW.to(self.models.device).split(MOST_DECODED)
                part = replace(part, images_BCHW=torch.cat([latents.decode(x_BCHW).cpu() for x_BCHW in few]))
            parts.append(part)
            done += len(batch.seeds)
            if progress:
                progress(done / len(request.seeds), f"{done} of {len(request.seeds)} images")
        return joined(parts)


def _require_offload(offload: Offload | None) -> None:
    if offload not in (None, "disk", "host"):
        raise SamplingError(f"unknown offload {offload!r}: use disk, host or None")


def _seeds(seeds: int | Sequence[int] | None, generator: torch.Generator | None, num_images: int) -> tuple[int, ...]:
    if seeds is not None and generator is not None:
        raise SamplingError("give either seeds or a generator: seeds are drawn from it")
    if generator is not None:
        drawn = torch.randint(0, 2**32, (num_images,), generator=generator, device=generator.device)
        return tuple(drawn.tolist())
    if seeds is None:
        return tuple(secrets.randbelow(2**32) for _ in range(num_images))
    if isinstance(seeds, int):
        return tuple(range(seeds, seeds + num_images))
    if len(seeds) != num_images:
        raise SamplingError(f"{len(seeds)} seeds for {num_images} images: give one each, or one to count up from")
    return tuple(int(seed) for seed in seeds)
