"""Samples of an evaluation on storage: whatever happens meanwhile, the figures are those of one that was left alone."""

import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from ddm_ray.cli import main
from ddm_ray.core.streams import SeedPurpose, consecutive_seeds
from ddm_ray.data.loading.loader import load_rows
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import DriftError, MissingArtifact
from ddm_ray.evaluate.candidates import Lineup
from ddm_ray.evaluate.compare import Side, compare
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.evaluate.samples import (
    BATCH,
    CandidateSamples,
    MakeSamples,
    SamplesPlan,
    SamplesRecord,
    SamplesStore,
    portions,
)
from ddm_ray.models.latents import Latents
from ddm_ray.run.graph import MONOLITH, STUDENT, Artifact, evaluation, shard
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import load_trained
from tests.evaluate.conftest import copied
from tests.random_run import make_run, publish
from tests.sampling import tiny_components
from tests.text_run import make_text_run

pytestmark = pytest.mark.contract

DEMO = evaluation("demo")


def figures(run: Run) -> str:
    """All metrics but the seconds, and but what other jobs there are."""
    metrics = read_metrics(run)
    del metrics["training"], metrics["missing"]
    for row in metrics["models"]:
        del row["seconds_per_image"]
    return json.dumps(metrics)


def ended(*work: Any) -> Iterator[Any]:
    """An executor that is interrupted after a chunk."""
    yield next(serial(*work))
    raise KeyboardInterrupt


def test_interrupted_three_times_it_goes_on_to_the_same_figures(
    random_run: Run, evaluated: Path, tmp_path: Path
) -> None:
    """Every portion is made once, and what is finished meanwhile isn't measured, which is said."""
    run, made = copied(random_run, tmp_path / "run"), list[str]()

    def ended_after(count: int) -> Any:
        def execute(*work: Any) -> Iterator[Any]:
            for number, chunk in enumerate(serial(*work)):
                made.append(chunk.record.part[0])
                yield chunk
                if number + 1 == count:
                    raise KeyboardInterrupt

        return execute

    for count in (1, 3, 2):
        with pytest.raises(KeyboardInterrupt):
            evaluate(run, execute=ended_after(count))
    assert run.manifest(DEMO) is None and len(made) == 6
    publish(run, STUDENT, load_trained(run, MONOLITH), 3, 4)
    shares: list[float] = []
    manifest = evaluate(run, on_progress=lambda share, _: shares.append(share), execute=ended_after(10**6))
    # Two portions of each of five candidates.
    assert len(made) == len({*made}) == 10 and shares == sorted(shares)
    assert {*made} == {name for name in manifest.files if name.startswith("samples/")}
    assert STUDENT not in manifest.identity.inputs
    assert figures(run) == figures(random_run)
    assert read_metrics(run)["missing"] == {STUDENT: "student (it was finished after this had begun)"}
    again = CliRunner().invoke(main, ["evaluate", run.url, "--name", "demo"])
    assert "warning: student: finished since" in again.stderr


def test_it_goes_on_by_the_same_models_alone(random_run: Run, tmp_path: Path) -> None:
    run = copied(random_run, tmp_path / "run")

    with pytest.raises(KeyboardInterrupt):
        evaluate(run, execute=ended)
    other = load_trained(run, Artifact("experts/001"))
    run.store.delete(Artifact("experts/000"))
    publish(run, Artifact("experts/000"), other, 300, 16)
    with pytest.raises(DriftError, match="eval/demo was begun otherwise: input experts/000"):
        evaluate(run)


def test_a_model_that_is_gone_is_asked_for_and_one_that_another_command_lacked_is_left_out(
    random_run: Run, tmp_path: Path
) -> None:
    run, gone = copied(random_run, tmp_path / "run"), tmp_path / "gone"
    monolith = tmp_path / "run" / MONOLITH
    loaded = Lineup.of

    def meanwhile(*arguments: Any) -> Lineup:
        """Another command begins the same evaluation before the monolith is finished, once."""
        lineup = loaded(*arguments)
        if not gone.exists():
            gone.touch()
            monolith.rename(tmp_path / "kept")
            with pytest.raises(KeyboardInterrupt):
                evaluate(run, execute=ended)
            (tmp_path / "kept").rename(monolith)
        return lineup

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lineup, "of", meanwhile)
        finished = evaluate(run)
    assert MONOLITH not in finished.identity.inputs
    assert [row["model"] for row in read_metrics(run)["models"]] == ["once", "full", "top-1", "top-2"]
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, "later", execute=ended)
    shutil.rmtree(monolith)
    with pytest.raises(MissingArtifact, match="no finished monolith"):
        evaluate(run, "later")


def test_two_commands_that_measure_at_once_leave_the_same_files(
    random_run: Run, evaluated: Path, tmp_path: Path
) -> None:
    """The second writes again what the first has committed, byte by byte, whatever it would have measured."""
    shutil.copytree(random_run.url, tmp_path / "run")
    run = Run.open(str(tmp_path / "run"))
    before = run.require(DEMO)
    (tmp_path / "run/eval/demo/_MANIFEST.json").unlink()
    (tmp_path / "run/eval/demo/report.html").write_text("half of")
    assert evaluate(run).files == before.files
    assert run.read(DEMO, "report.html")


def test_another_process_samples_the_same_images(random_run: Run, evaluated: Path) -> None:
    """From a pickled maker, which brings no models; a portion's images are those of one batch, to a 255th."""
    identity = random_run.identity(DEMO)
    chunks = SamplesStore(random_run, DEMO, SamplesPlan, SamplesRecord)
    maker = MakeSamples(chunks, identity, "cpu", Lineup.of(random_run, identity.inputs, {}, "cpu", {}))
    carried = pickle.dumps(maker)
    assert len(carried) < 10_000
    (plan, records) = chunks.begun(), [*KeptRecords.of(chunks)]
    assert plan is not None
    last = plan.units[-1]
    assert (last.candidate, last.first, len(last.numbers)) == ("top-2", BATCH, 300 - BATCH)
    made = pickle.loads(carried).load()(last)
    assert torch.equal(
        made.image_BCHW.float() / 127.5 - 1, [*CandidateSamples(chunks, plan, records, "top-2").images()][-1]
    )
    (own,) = (each for each in maker.lineup.candidates if each.name == "top-2")  # type: ignore[union-attr]
    assert portions([replace(own, name="a")], [1, 2])[0].work == 2 * own.cost


def test_rows_that_are_drawn_are_each_as_likely(random_run: Run) -> None:
    """Of both shards, the same for a seed, in the order of all rows."""
    shards = [shard(0), shard(1)]
    everything = load_rows(random_run, shards)
    drawn = [load_rows(random_run, shards, most=100, seed=seed) for seed in range(30)]
    for some in drawn:
        assert len(some) == 100 and some.ids == sorted(some.ids)
        place = [everything.ids.index(name) for name in some.ids[:3]]
        assert torch.equal(some.data_NCHW[:3], everything.data_NCHW[place])
    again = load_rows(random_run, shards[::-1], most=100, seed=4)
    assert again.ids == drawn[4].ids != drawn[5].ids
    times = np.array([sum(name in some.ids for some in drawn) for name in everything.ids])
    assert times.min() > 0 and times.max() < 22  # 8.3 on average, with a standard deviation of 2.5
    assert load_rows(random_run, shards, most=10**6).ids == everything.ids


def test_latents_are_seen_as_images(tmp_path: Path) -> None:
    tiny_components.autoencoder().save_pretrained(tmp_path / "vae")
    latents = f"data.latents={{autoencoder: {tmp_path / 'vae'}, downsampling: 2, scale: 0.5}}"
    small = ("evaluate.strategies=[once]", "evaluate.num_samples=10", "sample.steps=1")
    settings = (latents, "data.channels=4", "expert.model.analytic_skip=null", *small)
    run = make_run(str(tmp_path / "run"), settings=settings, num_rows=60)
    assert run.config.data.shape == (4, 8, 8)
    evaluate(run)
    chunks = SamplesStore(run, DEMO, SamplesPlan, SamplesRecord)
    plan, records = chunks.begun(), [*KeptRecords.of(chunks)]
    assert plan is not None
    (sampled,) = CandidateSamples(chunks, plan, records, "once").images()
    assert sampled.shape == (10, 3, 16, 16)
    assert Image.open(f"{run.url}/{DEMO}/grid.png").mode == "RGB"


def test_a_run_of_texts_is_asked_for_the_texts_of_held_out_rows(tmp_path: Path) -> None:
    """Guided by the empty text; clusters stand for classes where something has to be told apart."""
    small = (
        "evaluate.strategies=[once, full, top-1]",
        "evaluate.num_samples=24",
        "sample={steps: 2, guidance_scale: 2}",
    )
    run = make_text_run(tmp_path, small)
    config = run.config
    heldout = load_rows(run, [shard(0), shard(1)], "heldout")
    assert heldout.text is not None and len(heldout) == 10
    evaluate(run)
    metrics = read_metrics(run)
    assert [row["model"] for row in metrics["models"]] == ["once", "full", "top-1"] and [*metrics["missing"]] == [
        "monolith",
        "student",
    ]
    assert {row["accuracy"] for row in [*metrics["models"], *metrics["real"]]} == {None}
    assert [loss["model"] for loss in metrics["heldout_loss"]] == ["full", "top-1", "own cluster"]
    assert metrics["router"]["trajectories"][0]["n"] == 24
    chunks = SamplesStore(run, DEMO, SamplesPlan, SamplesRecord)
    plan, records = chunks.begun(), [*KeptRecords.of(chunks)]
    assert plan is not None
    once = CandidateSamples(chunks, plan, records, "once")
    counts = np.bincount(once.number_M.numpy(), minlength=10)
    assert sorted(counts) == [2] * 6 + [3] * 4, "every text in turn"
    lineup = Lineup.of(run, run.identity(DEMO).inputs, {}, "cpu", {})
    request = SampleRequest(
        consecutive_seeds(config.evaluate.seed, 24, SeedPurpose.EVALUATION),
        heldout.text[once.number_M],
        config.sample.changed(strategy="once"),
    )
    latents = lineup.mixture.sample(request).images_BCHW
    decoded = Latents.from_config(config.data.latents).decode(latents).clamp(-1, 1)
    (stored,) = once.images()
    assert (stored - decoded).abs().max() < 1 / 127
    comparison = compare([Side(run, "demo", "demo")], ["once", "full"])
    assert comparison.paired == ["once", "full"]
