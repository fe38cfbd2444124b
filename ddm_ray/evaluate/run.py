"""evaluate(run): sample every model on the same labels and seeds, score, and write the report."""

import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

import ddm_ray
from ddm_ray.config import RunConfig, SamplingSettings
from ddm_ray.core.routing import parse_strategy
from ddm_ray.core.streams import SeedPurpose, seeds
from ddm_ray.data import OnProgress, no_progress
from ddm_ray.data.loading.loader import Rows, load_rows
from ddm_ray.data.schema import HELDOUT, TRAIN
from ddm_ray.errors import ConfigError, DataError, DriftError, MissingArtifact
from ddm_ray.evaluate.costs import training_cost
from ddm_ray.evaluate.features import see, train_features
from ddm_ray.evaluate.figures import PER_CLASS, class_request, experts_figure, labels_B, real_images
from ddm_ray.evaluate.losses import heldout_losses, router_score
from ddm_ray.evaluate.report import render
from ddm_ray.evaluate.samples import one_thread, sample
from ddm_ray.evaluate.scores import Reference
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.pictures.png import to_png
from ddm_ray.sampling.request import SampleRequest, validate
from ddm_ray.sampling.run_models import ModelKind, Models, load_models, settings_of
from ddm_ray.storage.graph import MONOLITH, ROUTER, Artifact, evaluation, shard, trained_of
from ddm_ray.storage.info import EvaluationInfo
from ddm_ray.storage.manifest import FileRecord, Manifest
from ddm_ray.storage.run import Run

DENSE: tuple[ModelKind, ...] = ("monolith", "student")
"""Dense models, in the order in which they are shown."""


@dataclass(frozen=True)
class Candidate:
    """Models under settings, which make a line of the table; `cost`, in experts per velocity, weighs its progress."""

    name: str
    models: Models
    settings: SamplingSettings
    cost: float


def evaluate(run: Run, name: str = "demo", on_progress: OnProgress = no_progress, device: str = "cpu") -> Manifest:
    """Write eval/<name>: metrics.json, grid.png, experts.png and report.html; a no-op if it is finished.

    Experts must be finished. Of router, monolith and student it measures those that are, and names the others, as it
    does a monolith or a student that was made otherwise than this run wants it.
    Raises MissingArtifact, CorruptArtifact, DriftError; SamplingError for a strategy that doesn't exist; DataError
    without training rows.
    """
    if finished := run.finished(evaluation(name)):
        return finished
    on_progress(0.0, "reading rows and models")
    outdated = _outdated(run)
    identity, mixture = run.identity(evaluation(name)).without(outdated), load_models(run, "mixture", device)
    current = [kind for kind in DENSE if kind not in outdated and run.finished(Artifact(kind))]
    denses = {kind: load_models(run, kind, device) for kind in current}
    candidates, missing = _candidates(run, mixture, denses), _missing(run, mixture, denses) | outdated
    if not candidates:
        raise MissingArtifact(f"{run.url}: nothing to measure: {'; '.join(missing.values())}", run.make(MONOLITH))
    shards = [shard(cluster) for cluster in range(mixture.info.num_experts)]
    train, heldout = load_rows(run, shards, TRAIN), load_rows(run, shards, HELDOUT)
    request, seed = _request(run.config, train), run.config.evaluate.seed
    for candidate in candidates:
        validate(replace(request, settings=candidate.settings), candidate.models.info)
    with one_thread():
        on_progress(0.02, "training the classifier that measures")
        reference = _reference(run.config, mixture, train)
        table, pictures = _table(run.config, candidates, request, reference, on_progress)
        on_progress(0.88, "real rows and held-out losses")
        real, losses, router = [_drawn_again(reference, len(request.seeds))], [], None
        if len(heldout) > 1:
            score = reference.score(heldout.data_NCHW, heldout.label_N)
            real.append(_drawn_again(reference, len(heldout)))
            real.append({"model": f"real: {len(heldout)} held out"} | asdict(score))
            strategies, temperature = run.config.evaluate.strategies, request.settings.router_temperature
            # What a guided teacher says isn't the velocity of the data, nor is what its student learns.
            fair: dict[str, Models] = {
                kind: models for kind, models in denses.items() if kind != "student" or not run.config.student.guided
            }
            losses = heldout_losses(mixture, fair, heldout, strategies, seed, temperature)
            router = asdict(router_score(mixture, heldout, seed)) if mixture.router else None
        on_progress(0.96, "writing the report")
        experts_png = to_png(experts_figure(run, mixture, train))
    metrics = {
        "run": run.config.name,
        "name": name,
        "num_samples": len(request.seeds),
        "num_real": len(train),
        "num_heldout": len(heldout),
        "num_clusters": run.config.partition.num_clusters,
        "seed": seed,
        "sampling": request.settings.model_dump(mode="json", exclude={"strategy"}),
        "models": table,
        "missing": missing,
        "real": real,
        "heldout_loss": [asdict(loss) for loss in losses],
        "router": router,
        "training": asdict(training_cost(run, outdated)),
        "versions": _versions(),
    }
    files = {
        "metrics.json": json.dumps(metrics, indent=1).encode() + b"\n",
        "grid.png": pictures,
        "experts.png": experts_png,
        "report.html": render(metrics, pictures, experts_png).encode(),
    }
    # Seconds differ each time: a report that another process finished meanwhile must keep its files.
    if finished := run.finished(evaluation(name)):
        return finished
    for file, data in files.items():
        run.store.write(f"{evaluation(name)}/{file}", data)
    frechet = {row["model"]: row["frechet"] for row in table}
    measured = [strategy for strategy in run.config.evaluate.strategies if strategy in frechet]
    best = min(measured, key=frechet.__getitem__, default="once")
    info = EvaluationInfo(num_samples=len(request.seeds), frechet=frechet, best_strategy=best)
    records = {file: FileRecord.of(data) for file, data in files.items()}
    manifest = run.commit_records(evaluation(name), records, info, identity=identity)
    on_progress(1.0, "done")
    return manifest


def read_metrics(run: Run, name: str = "demo") -> dict[str, Any]:
    """metrics.json of a finished evaluation. Raises MissingArtifact, CorruptArtifact."""
    return json.loads(run.read(evaluation(name), "metrics.json"))


def _candidates(run: Run, mixture: Models, denses: Mapping[ModelKind, Models]) -> list[Candidate]:
    candidates = [
        Candidate(kind, models, settings_of(run, kind).changed(strategy="once"), 1) for kind, models in denses.items()
    ]
    for strategy in run.config.evaluate.strategies:
        chosen = parse_strategy(strategy, mixture.info.num_experts)
        if mixture.router is not None or chosen.when == "start":
            cost = {"start": 1, "step": 2, "velocity": mixture.info.num_experts}[chosen.when]
            candidates.append(Candidate(strategy, mixture, run.config.sample.changed(strategy=strategy), cost))
    return candidates


def _missing(run: Run, mixture: Models, denses: Collection[str]) -> dict[str, str]:
    """Words on all that isn't measured and why, by the artifact that it lacks."""
    routed = [
        strategy
        for strategy in run.config.evaluate.strategies
        if mixture.router is None and parse_strategy(strategy, mixture.info.num_experts).when != "start"
    ]
    lacks: dict[str, str] = {ROUTER: f"{', '.join(routed)} (there is no trained router)"} if routed else {}
    made = [kind for kind in DENSE if Artifact(kind) in trained_of(run.config)]
    return lacks | {kind: f"{kind} (it isn't trained)" for kind in made if kind not in denses}


def _outdated(run: Run) -> dict[str, str]:
    """Words on the dense models that were made otherwise than this run wants them, as by other experts."""
    outdated: dict[str, str] = {}
    for kind in DENSE:
        try:
            run.finished(Artifact(kind))
        except DriftError as error:
            outdated[kind] = f"{kind} ({error.message})"
    return outdated


def _request(config: RunConfig, train: Rows) -> SampleRequest:
    """Request for num_samples images, the same for every model; labels are drawn as frequent as in training rows."""
    count, seed = config.evaluate.num_samples, config.evaluate.seed
    if count < 2:
        raise ConfigError(f"evaluate.num_samples is {count}: a distance needs 2 or more")
    if config.data.num_classes is None:
        raise ConfigError("data.text: only class-conditional runs can be evaluated so far")
    if len(train) < 2:
        raise DataError(f"{len(train)} training rows in the run's shards: an evaluation needs 2 or more")
    row_B = np.random.default_rng(seed).integers(len(train), size=count)
    labels = train.label_N[torch.from_numpy(row_B)]
    return SampleRequest(seeds(seed, count, SeedPurpose.EVALUATION), labels, config.sample)


def _reference(config: RunConfig, mixture: Models, train: Rows) -> Reference:
    seed = config.evaluate.seed
    assert mixture.info.prior_CK is not None
    net = train_features(train.data_NCHW, train.label_N, config.data.num_classes or 0, seed)
    return Reference(net, train, see(net, train.data_NCHW), mixture.info.prior_CK.numpy(), seed)


def _drawn_again(reference: Reference, count: int) -> dict[str, Any]:
    return {"model": f"real: {count} drawn again"} | asdict(reference.floor(count))


def _table(
    config: RunConfig,
    candidates: list[Candidate],
    request: SampleRequest,
    reference: Reference,
    on_progress: OnProgress,
) -> tuple[list[dict[str, Any]], bytes]:
    """The table's lines, and the grid of a few samples of each candidate as PNG."""
    shown = class_request(config, reference.train, request)
    rows, table, before = [GridRow("real", real_images(reference.train, shown))], [], 0.08
    num_images = len(request.seeds)
    for candidate in candidates:
        share = 0.8 * candidate.cost / sum(other.cost for other in candidates)

        def on_part(part: float, name: str = candidate.name, before: float = before, share: float = share) -> None:
            on_progress(before + share * part, f"sampling {num_images} images: {name}")

        on_part(0.0)
        samples = sample(candidate.models, replace(request, settings=candidate.settings), on_part)
        costs = {
            "expert_rows_per_image": samples.sampled.num_expert_rows / num_images,
            "router_rows_per_image": samples.sampled.num_router_rows / num_images,
            "seconds_per_image": samples.seconds_per_image,
        }
        score = reference.score(samples.sampled.images_BCHW, labels_B(request))
        table.append({"model": candidate.name} | asdict(score) | costs)
        few = sample(candidate.models, replace(shown, settings=candidate.settings))
        rows.append(GridRow(candidate.name, few.sampled.images_BCHW))
        before += share
    headings = [config.data.class_names[label] for label in labels_B(shown)[::PER_CLASS].tolist()]
    return table, to_png(grid(rows, headings))


def _versions() -> dict[str, str]:
    return {
        "ddm_ray": ddm_ray.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
