"""The artifact graph: paths round trip, and every kind's row of the table fits the others."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.errors import CorruptArtifact
from ddm_ray.run.graph import (
    KINDS,
    MONOLITH,
    PARTITION,
    ROUTER,
    ROWS,
    Artifact,
    evaluation,
    expert,
    owner_rows,
    shard,
    trained_of,
)
from ddm_ray.run.identity import fields_of
from ddm_ray.run.info import Info
from ddm_ray.run.inputs import artifacts, inputs
from ddm_ray.run.manifest import Identity, Manifest
from tests.infos import info_of

GIVEN = ("partition.method=given",)


@pytest.fixture(params=[(), GIVEN], ids=["pooled", "given"])
def config(request: pytest.FixtureRequest) -> RunConfig:
    return load_recipe("tiny", request.param)


@given(st.sampled_from([owner_rows, shard, expert]), st.integers(0, 5000))
def test_paths_round_trip(of, cluster):
    artifact = of(cluster)
    again = Artifact(str(artifact))
    assert again == artifact and (again.kind, again.cluster, again.name) == (artifact.kind, cluster, None)


@pytest.mark.parametrize("artifact", [ROWS, PARTITION, ROUTER, expert(7), evaluation("a-b_c.1"), shard(12)])
def test_an_artifact_is_its_path_and_survives_a_pickle(artifact):
    copy = pickle.loads(pickle.dumps(artifact))
    assert type(copy) is Artifact and f"{copy}/x" == f"{artifact}/x"
    assert (copy.kind, copy.cluster, copy.name) == (artifact.kind, artifact.cluster, artifact.name)


@pytest.mark.parametrize(
    "path",
    [
        *("", "experts", "experts/", "experts/3", "experts/0003", "experts/-01", "experts/003/attempts"),
        *("rows/", "rows/x", "Rows", "eval", "eval/", "eval/a/b", "router/x", "partition/shards/cluster=1"),
        "experts/\u0663\u0663\u0663",
    ],
)
def test_another_path_is_no_artifact(path):
    with pytest.raises(ValueError, match="no artifact of a run"):
        Artifact(path)


def test_inputs_are_made_before_what_is_made_from_them(config):
    order = artifacts(config)
    assert len(set(order)) == len(order)
    for number, artifact in enumerate(order):
        known = {*order[:number], *(shard(cluster) for cluster in range(2)), *inputs(config, PARTITION)}
        assert known.issuperset(inputs(config, artifact))


def test_shards_that_are_given_are_never_pooled(config):
    pooled = {ROWS, ROUTER, MONOLITH}
    assert pooled.isdisjoint(artifacts(config)) == config.partition.given
    assert pooled.isdisjoint(trained_of(config)) == config.partition.given


def test_every_kind_names_fields_that_there_are(config):
    for kind, row in KINDS.items():
        artifact = Artifact(row.path or (row.member or "").format(0))
        assert artifact.kind == kind
        assert fields_of(config, artifact)


def test_an_identity_reads_what_its_stage_reads_and_no_more(config):
    """A change elsewhere must not make an artifact drift."""
    other = load_recipe("tiny", ("router.train.steps=7", *(GIVEN if config.partition.given else ())))
    changed = [
        artifact
        for artifact in (*artifacts(config), ROUTER)
        if fields_of(config, artifact) != fields_of(other, artifact)
    ]
    assert set(changed) == {ROUTER}


def test_every_kind_has_a_record_that_a_manifest_carries_unchanged():
    for row in KINDS.values():
        artifact = Artifact(row.path or (row.member or "").format(0))
        info = info_of(artifact)
        manifest = Manifest.from_json(Manifest(artifact, Identity({}), {}, info.as_json()).to_json(), "here")
        assert type(info).of(manifest) == info


@pytest.mark.parametrize("change", [{"step": "x"}, {"step": None}, {"loss": "low"}])
def test_a_record_of_another_form_is_a_corrupt_artifact_that_names_the_field(change):
    fields = info_of(ROUTER).as_json() | change
    [name] = change
    with pytest.raises(CorruptArtifact, match=rf"^router: .*info\.{name}"):
        ROUTER.info.of(Manifest(ROUTER, Identity({}), {}, fields))


def test_fields_of_a_later_version_are_passed_over():
    info = info_of(ROUTER)
    manifest = Manifest(ROUTER, Identity({}), {}, info.as_json() | {"novelty": 1})
    assert isinstance(info, Info) and type(info).of(manifest) == info
