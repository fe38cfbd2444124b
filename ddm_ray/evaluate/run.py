"""evaluate(run): sample every model on the same labels and seeds, score, and write the report."""

import json
import platform
from dataclasses import asdict, replace
from itertools import permutations
from typing import Any

import numpy as np
import torch

import ddm_ray
from ddm_ray.config import RunConfig
from ddm_ray.data import OnProgress, no_progress
from ddm_ray.data.loading.loader import Rows
from ddm_ray.data.schema import HELDOUT, TRAIN
from ddm_ray.data.sharded.stage import make_chunks
from ddm_ray.data.sharded.work import Executor
from ddm_ray.errors import MissingArtifact
from ddm_ray.evaluate.candidates import Decode, Lineup, decoder, outdated
from ddm_ray.evaluate.costs import training_cost
from ddm_ray.evaluate.features import train_features
from ddm_ray.evaluate.figures import experts_figure, shown_beside
from ddm_ray.evaluate.losses import Loss, heldout_losses
from ddm_ray.evaluate.prompts import captioned_rows, numbers_of, prompts, real_rows
from ddm_ray.evaluate.report import MOSAICS, render
from ddm_ray.evaluate.router import router_diagnostics
from ddm_ray.evaluate.samples import (
    CandidateSamples,
    ImagesObserver,
    MakeSamples,
    SamplesPlan,
    SamplesRecord,
    SamplesStore,
    here,
    one_thread,
    portions,
    read_portion,
    request_of,
)
from ddm_ray.evaluate.scores import Difference, Measured, Reference
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.pictures.png import to_png
from ddm_ray.sampling.request import SampleRequest, validate
from ddm_ray.sampling.run_models import Models, mixture_info
from ddm_ray.storage.graph import MONOLITH, evaluation
from ddm_ray.storage.info import EvaluationInfo
from ddm_ray.storage.manifest import FileRecord, Manifest
from ddm_ray.storage.run import Run


def evaluate(
    run: Run,
    name: str = "demo",
    on_progress: OnProgress = no_progress,
    device: str = "cpu",
    execute: Executor[SamplesRecord] | None = None,
    made_on: str | None = None,
) -> Manifest:
    """Write eval/<name>: samples, metrics.json, grid.png, experts.png and report.html; a no-op if it is finished.

    Experts must be finished. Of router, monolith and student it measures those that were when it was begun, and names
    the others, as it does a monolith or a student that was made otherwise than this run wants it. Killed at any moment,
    called again it goes on. `execute` makes the samples on devices `made_on`; None: this process does, on `device`, on
    which all is measured.
    Raises MissingArtifact, CorruptArtifact, DriftError; SamplingError for a strategy that doesn't exist; DataError
    without training rows.
    """
    artifact = evaluation(name)
    if finished := run.finished(artifact):
        return finished
    on_progress(0.0, "reading rows and models")
    chunks = SamplesStore(run, artifact, SamplesPlan, SamplesRecord)
    begun, old = chunks.begun(), outdated(run)
    identity = run.identity(artifact).without(old)
    if begun is not None:
        identity = identity.without(identity.inputs.keys() - {*begun.trained})
    lineup = Lineup.of(run, identity.inputs, old, device)
    if not lineup.candidates:
        raise MissingArtifact(
            f"{run.url}: nothing to measure: {'; '.join(lineup.missing.values())}", run.make(MONOLITH)
        )
    train, heldout = (real_rows(run, split) for split in (TRAIN, HELDOUT))
    captioned = None if run.config.data.text is None else heldout if len(heldout) else captioned_rows(run)
    prompts_N = prompts(run, captioned)
    numbers = numbers_of(run, train, prompts_N)
    request = request_of(run.config, prompts_N, numbers)
    for candidate in lineup.candidates:
        validate(candidate.request(request), candidate.models.info)
    with one_thread():
        trained = tuple(identity.inputs)
        plan = chunks.plan(lambda: SamplesPlan(portions(lineup.candidates, numbers), trained), identity)
        observer = ImagesObserver(plan.units, lambda share, note: on_progress(0.02 + 0.76 * share, note))
        maker = MakeSamples(chunks, identity, made_on or device, lineup if execute is None else None)
        records = make_chunks(chunks, plan, execute or here(device), read_portion, maker, observer)
        chunks.require_complete(plan, records)
        on_progress(0.8, "training the classifier that measures")
        decode = decoder(run, device)
        train_images, heldout_images = (replace(rows, data_NCHW=decode(rows.data_NCHW)) for rows in (train, heldout))
        reference = reference_of(run, train_images)
        measured: dict[str, Measured] = {}
        for number, candidate in enumerate(lineup.candidates):
            on_progress(0.82 + 0.1 * number / len(lineup.candidates), f"measuring: {candidate.name}")
            sampled = CandidateSamples(chunks, plan, records, candidate.name)
            measured[candidate.name] = reference.measure(sampled.images(), sampled.number_M)
        table = [
            {"model": name} | asdict(each.score) | CandidateSamples(chunks, plan, records, name).costs()
            for name, each in measured.items()
        ]
        differences = [
            asdict(Difference.of((name, other), measured[name], measured[other]))
            for name, other in permutations(measured, 2)
        ]
        on_progress(0.92, "real rows and held-out losses")
        real = _real_lines(reference, len(numbers), heldout_images)
        losses = _losses(run.config, lineup, heldout)
        router = router_diagnostics(lineup.mixture, heldout, request, run.config.evaluate.strategies, reference, decode)
        on_progress(0.96, "writing the report")
        shown = train_images if captioned is None else replace(captioned, data_NCHW=decode(captioned.data_NCHW))
        pictures = _grid(run.config, lineup, shown, request, decode)
        experts_png = to_png(experts_figure(run, lineup.mixture, shown, decode))
    metrics = {
        "run": run.config.name,
        "name": name,
        "num_samples": len(numbers),
        "num_real": len(train),
        "num_heldout": len(heldout),
        "num_clusters": run.config.partition.num_clusters,
        "seed": run.config.evaluate.seed,
        "sampling": run.config.sample.model_dump(mode="json", exclude={"strategy"}),
        "models": table,
        "differences": differences,
        "missing": lineup.missing,
        "real": real,
        "heldout_loss": [asdict(loss) for loss in losses],
        "router": router,
        "training": asdict(training_cost(run, old)),
        "versions": _versions(),
    }
    files = {
        "metrics.json": json.dumps(metrics, indent=1).encode() + b"\n",
        "grid.png": pictures,
        "experts.png": experts_png,
        "report.html": render(metrics, pictures, experts_png).encode(),
    }
    # Seconds differ each time: a report that another process finished meanwhile must keep its files.
    if finished := run.finished(artifact):
        return finished
    for file, data in files.items():
        run.store.write(f"{artifact}/{file}", data)
    chunks.delete_strays(records)
    frechet = {row["model"]: row["frechet"] for row in table}
    strategies = [strategy for strategy in run.config.evaluate.strategies if strategy in frechet]
    best = min(strategies, key=frechet.__getitem__, default="once")
    info = EvaluationInfo(num_samples=len(numbers), frechet=frechet, best_strategy=best)
    written = {file: FileRecord.of(data) for file, data in files.items()}
    written |= {file: part for record in records for file, part in record.files.items()}
    manifest = run.commit_records(artifact, written, info, identity=identity)
    on_progress(1.0, "done")
    return manifest


def read_metrics(run: Run, name: str = "demo") -> dict[str, Any]:
    """metrics.json of a finished evaluation. Raises MissingArtifact, CorruptArtifact."""
    return json.loads(run.read(evaluation(name), "metrics.json"))


def reference_of(run: Run, train: Rows) -> Reference:
    """The reference that the run's real rows make, as images."""
    config, prior_CK = run.config, mixture_info(run).prior_CK
    assert prior_CK is not None
    known = (train.label_N, classes) if (classes := config.data.num_classes) else (train.cluster_N, len(run.experts))
    net = train_features(train.data_NCHW, *known, config.evaluate.seed)
    return Reference.of(net, train, prior_CK.numpy(), config.evaluate.seed, labelled=bool(classes))


def _real_lines(reference: Reference, count: int, heldout: Rows) -> list[dict[str, Any]]:
    """Lines of the table that say what its numbers mean: rows as good as any sampler's, and mosaics."""
    scores = {f"real: {count} drawn again": reference.floor(count)}
    if len(heldout) > 1:
        scores[f"real: {len(heldout)} drawn again"] = reference.floor(len(heldout))
        scores[f"real: {len(heldout)} held out"] = reference.score([heldout.data_NCHW], heldout.label_N)
    scores[MOSAICS] = reference.mosaics(count)
    return [{"model": name} | asdict(score) for name, score in scores.items()]


def _losses(config: RunConfig, lineup: Lineup, heldout: Rows) -> list[Loss]:
    """Held-out losses of all that has a velocity, if there are such rows."""
    if len(heldout) < 2:
        return []
    # What a guided teacher says isn't the velocity of the data, nor is what its student learns.
    fair: dict[str, Models] = {
        kind: models for kind, models in lineup.denses.items() if kind != "student" or not config.student.guided
    }
    strategies, seed = config.evaluate.strategies, config.evaluate.seed
    return heldout_losses(lineup.mixture, fair, heldout, strategies, seed, config.sample.router_temperature)


def _grid(config: RunConfig, lineup: Lineup, rows: Rows, request: SampleRequest, decode: Decode) -> bytes:
    """A few samples of each candidate below real rows of their classes, or with their texts, as PNG."""
    shown, real, headings = shown_beside(config, rows, request)
    lines = [GridRow("real", real)]
    for candidate in lineup.candidates:
        few = candidate.sample(shown)
        lines.append(GridRow(candidate.name, decode(few.images_BCHW)))
    return to_png(grid(lines, headings))


def _versions() -> dict[str, str]:
    return {
        "ddm_ray": ddm_ray.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
