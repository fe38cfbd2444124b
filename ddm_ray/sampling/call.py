"""A call of a pipeline: its arguments made out, and the requests that they ask for.

Shapes: B images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from ddm_ray.config import SamplingSettings, invalid_fields
from ddm_ray.core.condition import Text
from ddm_ray.core.routing import Oracle, parse_strategy
from ddm_ray.errors import SamplingError
from ddm_ray.sampling import arguments
from ddm_ray.sampling.arguments import PromptConditions
from ddm_ray.sampling.components import Components
from ddm_ray.sampling.labels import Label, Prompt, class_number
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models


@dataclass(frozen=True)
class PipelineCall:
    """Images of `conditions`: for each the number of its prompt, and its seed; `negatives` and `cluster_P`, one a
    prompt.
    """

    components: Components
    conditions: PromptConditions
    settings: SamplingSettings
    prompt_of: tuple[int, ...]
    seeds: tuple[int, ...]
    cluster_P: Tensor | None = None
    negatives: tuple[str, ...] = ()
    noise_BCHW: Tensor | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Each image's prompt, or the name of its class."""
        return tuple(self.conditions.words[prompt] for prompt in self.prompt_of)

    def parts(self, batch_size: int) -> list[list[int]]:
        """Numbers of images that one request asks for, `batch_size` at most: those of one negative prompt in each."""
        negative_of = [self._negative(prompt) for prompt in self.prompt_of]
        alike = [
            [row for row, own in enumerate(negative_of) if own == negative] for negative in dict.fromkeys(negative_of)
        ]
        return [rows[begin : begin + batch_size] for rows in alike for begin in range(0, len(rows), batch_size)]

    def request(self, rows: list[int]) -> tuple[Models, SampleRequest]:
        """The request for the images of a part, and the models that it is for: a negative prompt is their null one."""
        prompts, noise = [self.prompt_of[row] for row in rows], self.noise_BCHW
        request = SampleRequest(
            tuple(self.seeds[row] for row in rows),
            self.conditions.of(prompts),
            self.settings,
            None if self.cluster_P is None else self.cluster_P[prompts],
            None if noise is None else noise[rows],
        )
        models, encoder, negative = self.components.models, self.components.text_encoder, self._negative(prompts[0])
        if not negative:
            return models, request
        assert encoder is not None
        null_text = encoder.encode([negative]).to("cpu")
        return replace(models, info=replace(models.info, null_text=null_text, trained_null=True)), request

    def _negative(self, prompt: int) -> str:
        return self.negatives[prompt] if self.negatives else ""


def call_of(
    components: Components,
    prompt: Prompt | Sequence[Prompt] | Text,
    class_labels: Label | Sequence[Label],
    *,
    negative_prompt: Prompt | Sequence[Prompt],
    num_images_per_prompt: Any,
    seeds: Any,
    generator: Any,
    latents: Any,
    clusters: Any,
    settings: dict[str, Any],
    known: Sequence[str] = (),
) -> PipelineCall:
    """The call with these arguments of DDMPipeline's. SamplingError for what can't be met.

    `known`: names of arguments that aren't settings, to list if a setting is unknown.
    """
    num_each = arguments.count("num_images_per_prompt", num_images_per_prompt)
    conditions = _conditions(components, prompt, class_labels)
    prompt_of = tuple(row for row in range(len(conditions)) for _ in range(num_each))
    seed_of = arguments.given_seeds(seeds, generator, len(prompt_of))
    chosen, cluster_P = _routed(components, settings, clusters, len(conditions), known)
    negatives = _negatives(components, negative_prompt, len(conditions), chosen.guidance_scale)
    noise_BCHW = arguments.given_noise(latents, (len(prompt_of), *components.models.info.image_shape))
    return PipelineCall(components, conditions, chosen, prompt_of, seed_of, cluster_P, negatives, noise_BCHW)


def _conditions(
    components: Components, prompt: Prompt | Sequence[Prompt] | Text, class_labels: Label | Sequence[Label]
) -> PromptConditions:
    """Conditions that the prompts or labels ask for."""
    info = components.models.info
    takes_texts = info.num_classes is None
    if (prompt is None) == (class_labels is None):
        raise SamplingError(f"give either prompt{'' if takes_texts else ' or class_labels'}: one, or a list of them")
    if isinstance(prompt, Text):
        return PromptConditions([""] * len(prompt), prompt.to("cpu"))
    if takes_texts:
        if prompt is None:
            raise SamplingError("these models know texts, not classes: give prompt in place of class_labels")
        words = arguments.given_texts(prompt)
        if components.text_encoder is None:
            raise SamplingError("this pipeline has no text_encoder: give it one, or a prompt that is encoded (Text)")
        return PromptConditions(words, components.text_encoder)
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
    numbers = [class_number(label, components.class_names, info.num_classes or 0) for label in labels]
    return PromptConditions(named, torch.tensor(numbers, dtype=torch.int64))


def _routed(
    components: Components, changes: dict[str, Any], clusters: Any, num_prompts: int, known: Sequence[str]
) -> tuple[SamplingSettings, Tensor | None]:
    """The call's settings and its prompts' clusters, int64. SamplingError for a strategy that lacks its router."""
    models, info = components.models, components.models.info
    try:
        settings = components.defaults.changed(**changes)
    except ValidationError as error:
        names = [*known, *SamplingSettings.model_fields]
        unknown = any(finding["type"] == "extra_forbidden" for finding in error.errors())
        raise SamplingError(invalid_fields(error) + (f"; known are {', '.join(names)}" if unknown else "")) from None
    if models.router is None and info.num_experts == 1:
        if changes.get("strategy", "once") != "once" or clusters is not None:
            raise SamplingError("a single network has no experts to choose from: leave out strategy and clusters")
        # The one expert is known beforehand: no table and no router has to be asked for it.
        return settings.changed(strategy="oracle"), torch.zeros(num_prompts, dtype=torch.int64)
    name = settings.strategy_or_once
    strategy = parse_strategy(name, info.num_experts)
    if models.router is None:
        without_table = info.num_classes is None or info.prior_CK is None
        if strategy.when != "start" or (name == "once" and without_table):
            others = "oracle" if without_table else "once or oracle"
            raise SamplingError(f"strategy {name!r} needs the router, which isn't there: use {others}")
    if isinstance(strategy, Oracle) is (clusters is None):
        raise SamplingError(f"strategy oracle, and no other, needs clusters: the strategy is {name}")
    return settings, None if clusters is None else arguments.clusters(clusters, num_prompts, info.clusters)


def _negatives(components: Components, given: Any, num_prompts: int, scale: float) -> tuple[str, ...]:
    """Each prompt's negative one; none at all where none is given."""
    if given is None:
        return ()
    if components.models.info.num_classes is not None:
        raise SamplingError("negative_prompt: these models know classes, not texts: guidance_scale is all there is")
    negatives = arguments.negatives(given, num_prompts)
    if not any(negatives):
        return ()
    if components.text_encoder is None:
        raise SamplingError("negative_prompt: this pipeline has no text_encoder: give it one")
    if scale <= 1:
        raise SamplingError(f"negative_prompt acts by guidance, and guidance_scale is {scale:g}: use more than 1")
    return negatives
