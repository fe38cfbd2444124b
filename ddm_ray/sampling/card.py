"""The model card of an exported dense model: what it is, what it was trained on at what cost, and what was measured."""

from ddm_ray import __version__
from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.models import weights
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.spec import spec_of
from ddm_ray.run.graph import PARTITION, ROWS, Artifact
from ddm_ray.run.info import EvaluationInfo, PartitionInfo, RowsInfo, TrainedInfo
from ddm_ray.run.inventory import evaluations
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import ModelKind

CARD = """---
library_name: diffusers
license: {license}
pipeline_tag: {task}
tags: [ddm-ray, flow-matching]
---

# {title}

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained(FOLDER_OR_REPOSITORY, trust_remote_code=True)
pipeline({call}).images[0].save("image.png")
```

{what}

The code beside the weights, a file for the pipeline and one for the network, needs torch, numpy and diffusers{more};
read it before you trust it. Sampling settings that a call leaves out are the run's: {settings}.

## Training

| | |
|---|---|
{training}

## Measured

{measured}

## Licence

Weights and what was learnt from the data: {license_words}. The code: Apache-2.0. Made by ddm-ray {version}.
"""

WHAT = {
    "monolith": "One network, trained on all rows: the experts' baseline.",
    "student": "One network, distilled from {experts} experts that were each trained on one part of the data,"
    " in isolation (Decentralized Diffusion Models, McAllister et al. 2025, section 3.4); its teacher: {teacher}.",
}


def model_card(run: Run, kind: ModelKind, license_name: str | None = None) -> str:
    """The card of a run's finished student or monolith as Markdown; no licence is said to be unknown.

    Raises MissingArtifact, CorruptArtifact, DriftError for artifacts that aren't finished or whole.
    """
    config, info = run.config, TrainedInfo.of(run.require(Artifact(kind)))
    data, student = run.named.data, config.student
    teacher = (
        "the expert of each datum's own cluster" if student.teacher == "label" else f"the mixture, {student.teacher}"
    )
    if student.guided:
        teacher += f", guided by {student.guidance_scale:g}"
    shape = " x ".join(map(str, data.shape))
    rows = {
        "data": f"{data.source}, {_rows(run)} as {'latents' if data.latents else 'images'} of {shape}",
        "conditions": "texts" if data.text else f"{data.num_classes} classes" if data.num_classes else "none",
        "parts of the data, and experts (K)": f"{config.partition.num_clusters}",
        "parameters": f"{num_parameters(weights.build(weights.base_spec(spec_of(config, kind)), 'meta')):,}",
        "steps": f"{info.step:,}, {info.rows_seen:,} rows seen",
        "FLOPs": f"{info.training_flops:.3g}",
        "loss of the last steps": f"{info.loss:.4g}",
    }
    if kind == "monolith" and config.expert.adapter and config.expert.train.init_from:
        base = config.expert.train.init_from.source
        rows["trained"] = f"an adapter of {info.parameters:,} parameters, merged into the network of {base}"
    if credit := run.credit:
        rows["pictures"] = credit
    sample = config.sample
    return CARD.format(
        license=license_name or "unknown",
        license_words=license_name or "unknown; ask their publisher",
        task="text-to-image" if data.text else "unconditional-image-generation",
        title=f"{config.name}: {kind}",
        what=WHAT[kind].format(experts=config.partition.num_clusters, teacher=teacher),
        call='"a text"' if data.text else f"class_labels={data.class_names[0]!r}" if data.class_names else "",
        more=", and transformers" if data.text else "",
        settings=f"{sample.solver}, {sample.steps} steps",
        training="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        measured=_measured(run, kind),
        version=__version__,
    )


def _rows(run: Run) -> str:
    """Number of training rows, by the rows or, where each owner has their own, by the partition."""
    if manifest := run.manifest(ROWS):
        return f"{RowsInfo.of(manifest).rows_train:,} rows"
    return f"{sum(PartitionInfo.of(run.require(PARTITION)).rows_K):,} rows"


def _measured(run: Run, kind: str) -> str:
    tables = []
    for artifact in evaluations(run):
        try:
            manifest = run.finished(artifact)
        except (CorruptArtifact, DriftError):
            continue  # of other models, or not whole: no figure of this one
        if manifest is None or kind not in (info := EvaluationInfo.of(manifest)).frechet:
            continue
        lines = [f"| {model} | {distance:.3g} |" for model, distance in info.frechet.items()]
        head = f"Evaluation `{artifact.name}`: Fréchet distance of {info.num_samples:,} samples, smaller is better."
        tables.append("\n".join([head, "", "| model | distance |", "|---|---|", *lines]))
    return "\n\n".join(tables) or "No finished evaluation of the run has measured this model."
