"""Clusters that join, leave and split: their rows, the others' shards, the prior, the router, and whose bytes stay."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from ddm_ray.data.append import appended, look_for_new, plan_rows
from ddm_ray.data.partition.groups import nearest_cluster
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.schema import embeddings, trains
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import ConfigError, DataError, MissingArtifact
from ddm_ray.jobs.copying import copy, copy_kept
from ddm_ray.jobs.examination import examine
from ddm_ray.models.spec import spec_of
from ddm_ray.run.graph import CENTROIDS, PARTITION, REPORT, ROUTER, ROWS, expert, owner_rows, rows_of, shard
from ddm_ray.run.info import PartitionInfo, ReportInfo, TrainedInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.initial_weights import copy_nearest, load_initial_weights, unfinished_nearest
from ddm_ray.sampling.run_models import load_models, load_trained, mixture_info
from ddm_ray.train.job import train_job
from ddm_ray.train.teachers import first_model
from tests.data.appended import make_base, sums, write_digits
from tests.data.rows import read_artifact
from tests.derived import append, derive
from tests.random_run import publish_models

pytestmark = pytest.mark.contract

FOUR = ("partition.num_clusters=4", "partition.num_fine=16")


def quiet(share: float, note: str) -> None: ...


def make_data(run: Run) -> None:
    """Rows and partition of a derived run, in this process."""
    for artifact in rows_of(run.config):
        prepare(run, cluster=artifact.cluster, execute=serial)
    partition(run)


def ids_of(run: Run, cluster: int) -> set[str]:
    return set(read_artifact(run, shard(cluster), ["id"])["id"].to_pylist())


def counts(run: Run) -> list[int]:
    return list(PartitionInfo.of(run.require(PARTITION)).rows_K)


def centroids_of(run: Run) -> dict[str, np.ndarray]:
    manifest = run.require(CENTROIDS)
    [name] = manifest.files
    return load(run.read(CENTROIDS, name, manifest))


def sound(run: Run) -> bool:
    return not [finding for finding in examine(run, deep=True) if finding.error]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_base(tmp_path_factory.mktemp("changed"), *FOUR)


def test_a_cluster_leaves_and_nothing_is_trained(four: Run, tmp_path: Path) -> None:
    before = sums(four)
    run = derive(four, url=str(tmp_path / "less"), drop=(2,))
    assert [expert(0), expert(1), expert(3)] == list(run.experts) and sums(four) == before
    assert counts(run) == [count for cluster, count in enumerate(counts(four)) if cluster != 2]
    assert (centroids_of(run)["coarse_KD"] == centroids_of(four)["coarse_KD"][[0, 1, 3]]).all()
    for cluster in (0, 1, 3):
        assert run.require(expert(cluster)).digest == four.require(expert(cluster)).digest
        assert run.require(shard(cluster)).digest == four.require(shard(cluster)).digest
    assert ROWS not in rows_of(run.config) and sound(run)
    every, left = load_models(four), load_models(run)
    assert left.info.num_experts == 3 and left.info.prior_CK is not None and every.info.prior_CK is not None
    expected_CK = every.info.prior_CK[:, [0, 1, 3]]
    torch.testing.assert_close(left.info.prior_CK[-1], expected_CK[-1] / expected_CK[-1].sum())
    asked = torch.randn(5, 1, 8, 8), torch.rand(5), torch.arange(5)
    posterior_BK = every.router(*asked).softmax(dim=1)[:, [0, 1, 3]]
    renormalised_BK = posterior_BK / posterior_BK.sum(dim=1, keepdim=True)
    torch.testing.assert_close(left.router(*asked).softmax(dim=1), renormalised_BK)
    assert TrainedInfo.of(run.require(ROUTER)).step == TrainedInfo.of(four.require(ROUTER)).step
    again = derive(four, url=run.url, drop=(2,))
    assert again.require(ROUTER) == run.require(ROUTER)


def test_of_an_owner_who_left_no_bytes_stay_in_a_copy(four: Run, tmp_path: Path) -> None:
    run = derive(four, url=str(tmp_path / "less"), drop=(2,))
    copy_kept(run, quiet)
    own = read_artifact(four, shard(2), ["id", "data"])
    ids, images = own["id"].to_pylist(), [bytes(data) for data in own["data"].to_pylist()]
    weights = four.read(expert(2), f"{TrainedInfo.of(four.require(expert(2))).weights}/ema.safetensors")
    pieces = [*(name.encode() for name in ids), *images, *(weights[start : start + 64] for start in (4096, -256))]
    others = {
        bytes(data)
        for cluster in (0, 1, 3)
        for data in read_artifact(four, shard(cluster), ["data"])["data"].to_pylist()
    }
    pieces = [piece for piece in pieces if piece not in others]
    everything = b"".join(path.read_bytes() for path in sorted(Path(run.url).rglob("*")) if path.is_file())
    assert len(pieces) > 50 and not [piece for piece in pieces if piece in everything]
    assert any(piece in everything for piece in others), "what stays is found by such a search"
    shutil.rmtree(tmp_path / "less")


def test_copies_of_changed_runs_stand_alone(tmp_path: Path) -> None:
    base = make_base(tmp_path, *FOUR)
    run = derive(base, url=str(tmp_path / "less"), drop=(0,))
    copy(run, str(tmp_path / "whole"), None, quiet)
    copy_kept(run, quiet)
    shutil.rmtree(base.url)
    for url in (run.url, str(tmp_path / "whole")):
        own = Run.open(url)
        assert own.base is None and all(own.require(each) for each in (PARTITION, CENTROIDS, ROUTER, *own.experts))
        assert sound(own) and load_models(own).info.num_experts == 3
        later = derive(own, url=f"{url}-later", drop=(3,))
        assert counts(later) == counts(own)[:2] and sound(later)
    with pytest.raises(MissingArtifact, match="stayed where they were prepared"):
        make_data(derive(Run.open(str(tmp_path / "whole")), url=str(tmp_path / "split"), split=(1,)))


def test_a_cluster_splits_in_two(four: Run, tmp_path: Path) -> None:
    before = sums(four)
    run = derive(four, url=str(tmp_path / "split"), split=(1,))
    make_data(run)
    assert run.config.partition.clusters == (0, 2, 3, 4, 5) and sums(four) == before
    assert ids_of(run, 4) | ids_of(run, 5) == ids_of(four, 1) and not ids_of(run, 4) & ids_of(run, 5)
    assert sum(counts(run)) == sum(counts(four)) and min(counts(run)) > 0
    rows, coarse_KD = read_artifact(four, ROWS), centroids_of(run)["coarse_KD"]
    near = np.linalg.norm(embeddings(rows)[:, None] - coarse_KD[3:], axis=2).argmin(axis=1)
    placed = dict(zip(rows["id"].to_pylist(), near.tolist(), strict=True))
    assert ids_of(run, 4) == {each for each in ids_of(four, 1) if placed[each] == 0}
    own = load_trained(four, expert(1)).state_dict()
    for child in (4, 5):
        first = first_model(run, train_job(run, expert(child))).state_dict()
        assert all(torch.equal(first[name], own[name]) for name in own)
        assert train_job(run, expert(child)).key == (2, child)
    [beginning] = [each for each in run.inputs(ROUTER) if each.kind == "beginning"]
    router = load_initial_weights(run, beginning, spec_of(run.config, "router"))
    asked = torch.randn(5, 1, 8, 8), torch.rand(5), torch.arange(5)
    parents_BK = load_trained(four, ROUTER)(*asked).softmax(dim=1)
    children_BK = router(*asked).softmax(dim=1)
    torch.testing.assert_close(children_BK[:, 3] + children_BK[:, 4], parents_BK[:, 1])
    torch.testing.assert_close(children_BK[:, :3], parents_BK[:, [0, 2, 3]])
    assert run.finished(ROUTER) is None and sound(run)
    again = make_data(run)
    assert again is None


@pytest.mark.parametrize("number", [1, 2])
def test_new_images_form_clusters_of_their_own(four: Run, tmp_path: Path, number: int) -> None:
    ids = write_digits(tmp_path / "scans", range(300, 340), inverted=True)
    run = derive(four, url=str(tmp_path / "more"), add=((str(tmp_path / "scans"), number),))
    with pytest.raises(MissingArtifact, match=r"rows/cluster=004 yet; make rows"):
        partition(run)
    make_data(run)
    made = [ids_of(run, cluster) for cluster in range(4, 4 + number)]
    assert sorted(each for one in made for each in one) == sorted(ids)
    assert counts(run)[:4] == counts(four) and all(run.inherits(shard(cluster)) for cluster in range(4))
    assert [run.require(each).digest for each in run.experts[:4]] == [
        four.require(each).digest for each in four.experts
    ]
    rows = read_artifact(run, owner_rows(4))
    if number == 1:
        mean_D = embeddings(rows)[trains(rows)].mean(axis=0)
        assert np.linalg.norm(centroids_of(run)["coarse_KD"] - mean_D, axis=1).argmin() == 4
    pixels = [
        next((Path(each.url) / name / "_embedder").glob("*.safetensors"))
        for each, name in ((four, ROWS), (run, owner_rows(4)))
    ]
    assert pixels[0].read_bytes() == pixels[1].read_bytes(), "embeddings are comparable"
    assert not [each for each in run.inputs(expert(4)) if each.kind == "beginning"] and sound(run)
    info = mixture_info(run)
    assert info.num_experts == 4 + number
    assert run.require(REPORT)


def test_an_experts_weights_may_begin_a_new_one(four: Run, tmp_path: Path) -> None:
    write_digits(tmp_path / "scans", range(300, 320))
    run = derive(four, url=str(tmp_path / "more"), add=((str(tmp_path / "scans"), 1),), begin_from=2)
    make_data(run)
    own, first = load_trained(four, expert(2)).state_dict(), first_model(run, train_job(run, expert(4))).state_dict()
    assert all(torch.equal(first[name], own[name]) for name in own)


def test_a_new_expert_may_begin_as_the_nearest_one(four: Run, tmp_path: Path) -> None:
    ids = sorted(ids_of(four, 1))[:12]
    for each in ids:
        path = tmp_path / "scans" / each
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(four.config.data.source) / each, path)
    run = derive(four, url=str(tmp_path / "more"), add=((str(tmp_path / "scans"), 1),), begin_from="nearest")
    make_data(run)
    assert unfinished_nearest(run) == [expert(4)] and nearest_cluster(run, 4) == 1
    copy_nearest(run, expert(4), nearest_cluster(run, 4))
    assert unfinished_nearest(run) == []
    own, first = load_trained(four, expert(1)).state_dict(), first_model(run, train_job(run, expert(4))).state_dict()
    assert all(torch.equal(first[name], own[name]) for name in own)


def test_images_of_unknown_classes_do_not_join(four: Run, tmp_path: Path) -> None:
    write_digits(tmp_path / "scans", range(300, 320))
    (tmp_path / "scans/0").rename(tmp_path / "scans/eleven")
    run = derive(four, url=str(tmp_path / "more"), add=((str(tmp_path / "scans"), 1),))
    with pytest.raises(DataError, match="no class: eleven"):
        make_data(run)


def test_a_chain_of_changes_adds_up(tmp_path: Path) -> None:
    base = make_base(tmp_path, *FOUR)
    write_digits(tmp_path / "scans", range(300, 340), inverted=True)
    joined = derive(base, url=str(tmp_path / "1"), add=((str(tmp_path / "scans"), 1),))
    make_data(joined)
    publish_models(joined)
    write_digits(tmp_path / "photos", range(200, 230))
    grown = append(joined, {"expert": 20}).run
    make_data(grown)
    publish_models(grown)
    split = derive(grown, url=str(tmp_path / "3"), split=(4, 0))
    make_data(split)
    publish_models(split)
    less = derive(split, url=str(tmp_path / "4"), drop=(1, 6))
    last = derive(less, "sample.steps=3", url=str(tmp_path / "5"))
    assert last.config.partition.clusters == (2, 3, 5, 7, 8) and last.kept.keys() >= {PARTITION, ROUTER, expert(8)}
    assert ids_of(split, 5) | ids_of(split, 6) == ids_of(grown, 0)
    assert ids_of(split, 7) | ids_of(split, 8) == ids_of(grown, 4) >= ids_of(joined, 4)
    assert sum(counts(grown)) == sum(counts(joined)) + len(
        [row for row in read_artifact(grown, ROWS, ["split"])["split"].to_pylist() if row == "train"]
    )
    expected = [counts(split)[split.config.partition.position(cluster)] for cluster in (2, 3, 5, 7, 8)]
    assert counts(last) == counts(less) == expected and load_models(last).info.num_experts == 5
    for run in (joined, grown, split, less, last):
        assert sound(run)
    more = derive(last, url=str(tmp_path / "6"), add=((str(tmp_path / "scans"), 1),))
    assert more.config.partition.clusters[-1] == 9


def test_images_of_several_sources_are_not_prepared_from_one(four: Run, tmp_path: Path) -> None:
    write_digits(tmp_path / "scans", range(300, 320))
    run = derive(four, url=str(tmp_path / "more"), add=((str(tmp_path / "scans"), 1),))
    make_data(run)
    less = derive(four, url=str(tmp_path / "less"), drop=(1,))
    for pieced in (run, less):
        for setting in ("partition.seed=1", "data.heldout=0.5", "embedder.dim=4"):
            with pytest.raises(ConfigError, match="came, or change, one by one"):
                derive(pieced, setting, url=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="came, or change, one by one"):
        derive(four, "data.heldout=0.5", url=str(tmp_path / "none"), drop=(1,))
    with pytest.raises(ConfigError, match="it isn't known which are new: add the new images as a cluster"):
        append(less, {})
    assert derive(four, "partition.seed=1", url=str(tmp_path / "other")).fingerprint != four.fingerprint


def test_new_files_may_come_while_a_cluster_leaves(tmp_path: Path) -> None:
    base = make_base(tmp_path, *FOUR)
    write_digits(tmp_path / "photos", range(200, 260))
    new = look_for_new(base)
    run = derive(base, url=str(tmp_path / "both"), append=appended(new), drop=(1,))
    plan_rows(run, new)
    make_data(run)
    assert len(ReportInfo.of(run.require(REPORT)).fit) == 3 and sound(run)


def test_equal_ids_of_two_sources_are_told_apart(tmp_path: Path) -> None:
    base = make_base(tmp_path, *FOUR)
    write_digits(tmp_path / "scans", range(300, 340), inverted=True)
    joined = derive(base, url=str(tmp_path / "1"), add=((str(tmp_path / "scans"), 1),))
    make_data(joined)
    publish_models(joined)
    write_digits(tmp_path / "photos", range(300, 330))  # the paths of some scans
    grown = append(joined, {"expert": 20}).run
    make_data(grown)
    publish_models(grown)
    split = derive(grown, url=str(tmp_path / "3"), split=(4,))
    make_data(split)
    assert ids_of(split, 5) | ids_of(split, 6) == ids_of(grown, 4) and sound(split)


def test_given_shards_join_and_leave_as_their_owners_do(tmp_path: Path) -> None:
    from ddm_ray.config import load_recipe

    settings = ("partition.method=given", "partition.num_clusters=2")
    base = Run.create(str(tmp_path / "base"), load_recipe("tiny", settings))
    for cluster in range(3):
        write_digits(tmp_path / f"owner{cluster}", range(100 * cluster, 100 * cluster + 40))
    for cluster in range(2):
        prepare(base, source=str(tmp_path / f"owner{cluster}"), cluster=cluster, execute=serial)
        partition(base, cluster=cluster)
    partition(base)
    run = derive(base, url=str(tmp_path / "more"), add=((str(tmp_path / "owner2"), 1),), drop=(0,))
    assert run.config.partition.clusters == (1, 2) and run.inherits(shard(1))
    prepare(run, cluster=2, execute=serial)
    partition(run, cluster=2)
    partition(run)
    assert counts(run)[0] == counts(base)[1] and ids_of(run, 2)
    with pytest.raises(ConfigError, match="only clusters of k-means"):
        derive(base, url=str(tmp_path / "split"), split=(0,))
    with pytest.raises(ConfigError, match="an owner with more adds a cluster of them"):
        append(base, {})
