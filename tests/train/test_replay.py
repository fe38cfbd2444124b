"""A router that is trained on what experts sample: which images, and that no row is needed."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data.loading.loader import load_rows
from ddm_ray.data.schema import read_parquet
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sharded.work import ChunkMaker, ReadUnit, Task
from ddm_ray.errors import ConfigError, DriftError, MissingArtifact
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import survey
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.placement import TrainPlacement
from ddm_ray.run import graph
from ddm_ray.run.graph import MONOLITH, PARTITION, ROUTER, ROWS, Artifact, expert, replay, shard
from ddm_ray.run.info import PartitionInfo, ShardInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_trained
from ddm_ray.train import replay as replaying
from ddm_ray.train import worker
from ddm_ray.train.job import train_job
from ddm_ray.train.replay import images_of, make_replay
from tests.random_run import make_run, publish

pytestmark = pytest.mark.contract

REPLAYED = ("router.replay=70", "sample.steps=3", "router.train.steps=4", "router.train.batch=8")


def without_router(path: Path, *settings: str) -> Run:
    """A run whose experts are finished, and its router isn't."""
    run = make_run(str(path), settings=(*REPLAYED, *settings), num_rows=120)
    shutil.rmtree(path / ROUTER)
    return run


def ended_after_one(read: ReadUnit, maker: ChunkMaker[Any, Any], tasks: Sequence[Task[Any]]) -> Any:
    """An executor whose process is killed after its first chunk."""
    yield next(iter(serial(read, maker, tasks)))
    raise KeyboardInterrupt


@pytest.mark.usefixtures("world_of_one")
def test_a_router_is_trained_on_what_experts_sample_alone(tmp_path: Path) -> None:
    run = without_router(tmp_path / "run", "partition.method=given")
    for away in (ROWS, MONOLITH, *(f"{artifact}/train-00000.parquet" for artifact in graph.shards_of(run.config))):
        path = tmp_path / "run" / away
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(MissingArtifact, match="make replay/cluster=000"):
        worker.train(run.url, ROUTER, TrainPlacement())
    for cluster in range(len(run.experts)):
        make_replay(run, cluster, serial)
    assert train_job(run, ROUTER).shards == (replay(0), replay(1))
    worker.train(run.url, ROUTER, TrainPlacement())
    assert run.require(ROUTER).identity.inputs.keys() == {PARTITION, replay(0), replay(1)}
    assert DDMPipeline.from_run(run)(class_labels=[1], strategy="top-1", seeds=1).images
    assert [each.state for each in survey(run) if each.artifact.kind in ("replay", "router")] == ["finished"] * 3


def test_they_are_the_experts_own_in_the_shares_of_the_rows(tmp_path: Path) -> None:
    run = without_router(tmp_path / "run")
    manifests = [make_replay(run, cluster, serial) for cluster in range(2)]
    counts = PartitionInfo.of(run.require(PARTITION))
    infos = [ShardInfo.of(manifest) for manifest in manifests]
    assert sum(info.rows_train for info in infos) == 70
    for info, rows in zip(infos, counts.rows_K, strict=True):
        assert abs(info.rows_train - 70 * rows / sum(counts.rows_K)) <= 1
    for cluster in range(2):
        own_C = np.array(counts.counts_CK)[:, cluster]
        assert not np.array(infos[cluster].counts_C)[own_C == 0].any(), "of classes that it has"
        rows = load_rows(run, [replay(cluster)])
        numbers = images_of(run, cluster)
        assert rows.ids == [f"replay/{cluster:03d}/{number:09d}" for number in numbers]
        assert (rows.cluster_N == cluster).all()
        request = replaying.replay_request(run.config, replaying.ReplayPortion(0, tuple(rows.label_N.tolist())))
        first = request.seeds[0] + numbers[0]
        drawn = DDMPipeline.from_run(run)(
            class_labels=rows.label_N.tolist(),
            seeds=list(range(first, first + len(rows))),
            strategy="oracle",
            clusters=[cluster] * len(rows),
            guidance_scale=1.0,
            num_inference_steps=3,
            output_type="pt",
        ).images
        shown = (rows.data_NCHW + 1) / 2
        assert (shown - drawn).abs().max() < 1 / 255 + 1e-5, "to a 255th, as rows are"


def test_killed_it_goes_on_by_the_same_expert_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "PORTION", 9)
    monkeypatch.setattr(replaying, "BATCH", 4)
    run, quiet = without_router(tmp_path / "run"), without_router(tmp_path / "quiet")
    undisturbed = make_replay(quiet, 0, serial)
    for cluster in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            make_replay(run, cluster, ended_after_one)
    (begun,) = [each for each in survey(run) if each.artifact == replay(0)]
    assert begun.state == "begun" and describe(begun) == f"1 of {len(undisturbed.files)} portions of images"
    assert make_replay(run, 0, serial).files == undisturbed.files
    other = load_trained(run, Artifact("experts/000"))
    run.store.delete(expert(1))
    publish(run, expert(1), other, 10, 16)
    with pytest.raises(DriftError, match="replay/cluster=001 was begun otherwise: input experts/001"):
        make_replay(run, 1, serial)
    run.store.delete(expert(0))
    publish(run, expert(0), other, 11, 16)
    with pytest.raises(DriftError, match="replay/cluster=000 was made otherwise: input experts/000"):
        run.require(replay(0))


def test_latents_are_kept_as_latents(tmp_path: Path) -> None:
    run = without_router(tmp_path / "run", "data.latents={autoencoder: none, scale: 1.0}", "data.horizontal_flips=true")
    make_replay(run, 0, serial)
    rows = load_rows(run, [replay(0)])
    assert rows.data_NCHW.shape[1:] == (1, 8, 8) and rows.data_NCHW.isfinite().all()
    assert (rows.data_NCHW.half().float() == rows.data_NCHW).all()
    assert (
        "mirrored"
        not in read_parquet(run.read(replay(0), next(iter(make_replay(run, 0, serial).files))), "").schema.names
    )


def test_what_experts_sample_is_augmented_already(tmp_path: Path) -> None:
    """It has neither a margin nor a mirror image, and the router draws no view of it."""
    run = without_router(tmp_path / "run", "data.crop_margin=2", "data.horizontal_flips=true")
    job = train_job(run, ROUTER)
    assert job.augmentation.draw(0, job.key, 0, 4) is None


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("laion256-k8", ("router.replay=100",), "images are asked for by texts, which are their owners'"),
        ("tiny", ("router.replay=1",), "less than an image for each of 2 experts"),
        ("tiny", ("router.replay=-1",), "router.replay"),
    ],
)
def test_what_has_no_replay_is_refused(recipe: str, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe, settings)


def test_a_router_of_rows_needs_none(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), num_rows=60)
    with pytest.raises(ConfigError, match=r"router is trained on rows .*router\.replay"):
        make_replay(run, 0, serial)
    assert not [each for each in survey(run) if each.artifact.kind == "replay"]
    assert train_job(run, ROUTER).shards == (shard(0), shard(1))
