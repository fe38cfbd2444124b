"""Evaluate a run: sample every model on the same conditions and seeds, measure, and write the report."""

import json
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from ddm_ray.data import OnProgress, no_progress, phase
from ddm_ray.data.sharded.stage import ShareReporter, make_chunks
from ddm_ray.data.sharded.work import Executor, read_whole
from ddm_ray.errors import MissingArtifact
from ddm_ray.evaluate.candidates import Lineup, decoder, later_than, newest_milestones, outdated
from ddm_ray.evaluate.captions import CaptionScore
from ddm_ray.evaluate.features import load_embedder
from ddm_ray.evaluate.measure import best_strategy, measure
from ddm_ray.evaluate.real_rows import RealRows, prompts_of
from ddm_ray.evaluate.reference import Instruments, named
from ddm_ray.evaluate.report import render_report
from ddm_ray.evaluate.samples import (
    CandidateSamples,
    MakeSamples,
    Milestone,
    SamplesPlan,
    SamplesRecord,
    SamplesStore,
    here,
    one_thread,
    portions,
    request_of,
)
from ddm_ray.models.clip import Clip
from ddm_ray.run.graph import MONOLITH, Artifact, evaluation
from ddm_ray.run.info import EvaluationInfo
from ddm_ray.run.manifest import FileRecord, Manifest
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import validate

REPORT = "_report/REPORT.json"
"""JSON object that names the file of results, before the manifest commits them."""


def evaluate(
    run: Run,
    name: str = "demo",
    on_progress: OnProgress = no_progress,
    device: str = "cpu",
    execute: Executor[Any] | None = None,
    made_on: str | None = None,
    at: int | None = None,
) -> Manifest:
    """Write eval/<name>: samples, metrics.json, pictures and report.html. A no-op if it is finished.

    Of router, monolith and student, it measures those that existed when it began, and names the others, including a
    monolith or student that doesn't match this run. A model that is still training is measured by its newest
    milestone; every expert needs one. `at`: measure all models by their newest weights after at most this many steps.
    A killed call is resumed by calling again. `execute` makes the samples, and embeds real rows, on devices
    `made_on`; None: this process does so on `device`, which also runs all measurements.
    Raises MissingArtifact, CorruptArtifact, DriftError; SamplingError for an unknown strategy; DataError without
    training rows; and the errors of `load_embedder` and `Clip.from_pretrained`.
    """
    artifact = evaluation(name)
    if finished := run.finished(artifact):
        return finished
    on_progress(0.0, "reading rows and models")
    chunks = SamplesStore(run, artifact, SamplesPlan, SamplesRecord)
    begun, old = chunks.begun(), outdated(run) | later_than(run, at)
    earlier = newest_milestones(run, at) if begun is None else begun.earlier
    identity = run.identity(artifact).without({*old, *earlier})
    if begun is not None:
        for trained in begun.trained:
            run.require(Artifact(trained))
        identity = identity.without(identity.inputs.keys() - {*begun.trained})

    def on_loaded(loaded: int, total: int) -> None:
        on_progress(0.02 * loaded / total, f"loading networks: {loaded} of {total}")

    lineup = Lineup.of(run, identity.inputs, old, device, earlier, on_loaded)
    if not lineup.candidates:
        lacks = "; ".join(lineup.missing.values())
        raise MissingArtifact(f"{run.url}: nothing to measure: {lacks}", run.make(MONOLITH))
    config = run.config.evaluate
    # Loaded now, so that an error shows before hours of sampling.
    embedder = load_embedder(config.features, device)
    clip = None if config.clip is None else Clip.from_pretrained(config.clip, device)
    rows = RealRows.of(run, device)
    run.finished(named(run.config, rows.elsewhere))  # raises DriftError now rather than after sampling
    captions = None if clip is None else CaptionScore.of(clip, rows)
    prompts_N = prompts_of(run, rows)
    numbers = rows.numbers(config, prompts_N)
    request = request_of(run.config, prompts_N, numbers)
    for candidate in lineup.candidates:
        validate(candidate.request(request), candidate.models.info)
    executor: Executor[Any] = execute or here(device)
    with one_thread():
        units, milestones = portions(lineup.candidates, numbers), tuple(map(Milestone.of, earlier.values()))
        plan = chunks.plan(lambda: SamplesPlan(units, tuple(identity.inputs), milestones), identity)
        if {*plan.trained} != {*identity.inputs} or plan.earlier != earlier:
            # A concurrent command began the evaluation with the models of that moment.
            return evaluate(run, name, on_progress, device, execute, made_on, at)
        observer = ShareReporter[SamplesRecord](plan.units, phase(on_progress, 0.02, 0.78), "sampling")
        own = (lineup, observer.partly) if execute is None else (None, None)
        maker = MakeSamples(chunks, identity, made_on or device, *own)
        records = list(make_chunks(chunks, plan, executor, read_whole, maker, observer))
        samples = [CandidateSamples(chunks, plan, records, candidate.name) for candidate in lineup.candidates]

        def measured() -> tuple[bytes, dict[str, Any]]:
            by = Instruments(decoder(run, device), embedder, executor, made_on or device, captions)
            metrics, pictures = measure(run, name, lineup, rows, request, samples, by, on_progress)
            page = render_report(metrics, pictures).encode()
            text = json.dumps(metrics, indent=1).encode() + b"\n"
            files = {"metrics.json": text, **pictures, "report.html": page}
            return save({file: np.frombuffer(data, np.uint8) for file, data in files.items()}), {}

        # Written once: of two concurrent commands, each writes the files that either one's manifest names.
        packed, _ = chunks.write_once(REPORT, ".safetensors", measured)
    files = {file: data.tobytes() for file, data in load(packed).items()}
    for file, data in files.items():
        run.store.write(f"{artifact}/{file}", data)
    chunks.delete_strays(records)
    frechet = {row["model"]: row["frechet"] for row in json.loads(files["metrics.json"])["models"]}
    info = EvaluationInfo(num_samples=len(numbers), frechet=frechet, best_strategy=best_strategy(run.config, frechet))
    written = {file: FileRecord.of(data) for file, data in files.items()}
    written |= {file: part for record in records for file, part in record.files.items()}
    manifest = run.commit_records(artifact, written, info, identity=identity)
    on_progress(1.0, "done")
    return manifest


def read_metrics(run: Run, name: str = "demo") -> dict[str, Any]:
    """metrics.json of a finished evaluation. Raises MissingArtifact, CorruptArtifact."""
    return json.loads(run.read(evaluation(name), "metrics.json"))
