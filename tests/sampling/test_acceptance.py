"""Acceptance by hand: what an island has trained counts once somebody has looked at it, and then by its bytes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.cli.fixes import phrase
from ddm_ray.errors import CorruptArtifact, DriftError, MissingArtifact, ServeError
from ddm_ray.evaluate.candidates import newest_milestones
from ddm_ray.jobs.copying import copy
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import status
from ddm_ray.run.garbage import leftovers
from ddm_ray.run.graph import MONOLITH, ROUTER, STUDENT, Artifact, replay
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.manifest import NAME, FileRecord, Manifest
from ddm_ray.run.run import Run
from ddm_ray.sampling.acceptance import accept_made
from ddm_ray.sampling.run_models import load_models
from ddm_ray.serve.engine.versions import Versions
from tests.infos import info_of
from tests.random_run import make_run

pytestmark = pytest.mark.contract

EXPERT = Artifact("experts/001")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A finished run of which nothing is accepted yet."""
    return make_run(str(tmp_path / "run"), settings=("acceptance=by_hand",))


def rewrite(run: Run, change: Callable[[bytes], bytes]) -> None:
    """Change the expert's weights, and the manifest with them, as only its island can."""
    manifest = run.manifest(EXPERT)
    assert manifest
    name = f"{TrainedInfo.of(manifest).weights}/ema.safetensors"
    tensors = change(run.read(EXPERT, name, manifest))
    run.store.write(f"{EXPERT}/{name}", tensors)
    files = {**manifest.files, name: FileRecord.of(tensors)}
    forged = Manifest(manifest.artifact, manifest.identity, files, manifest.info, manifest.content)
    run.store.write(f"{EXPERT}/{NAME}", forged.to_json())


def negated_last(tensors: bytes) -> bytes:
    """The same tensors with the sign of the last number changed."""
    return tensors[:-1] + bytes([tensors[-1] ^ 0x80])


def test_nothing_counts_before_it_is_accepted(run: Run) -> None:
    with pytest.raises(MissingArtifact, match=r"experts/000 is finished, but not accepted yet; accept experts"):
        load_models(run)
    with pytest.raises(ServeError, match=r"no expert of .* is accepted yet"):
        Versions(run, None).newest()
    assert run.identity(STUDENT).inputs.keys() == {"partition"}
    assert newest_milestones(run) == {}
    for artifact in run.experts:
        accept_made(run, artifact)
    assert load_models(run).router is None
    accept_made(run, ROUTER)
    assert load_models(run).router is not None
    assert {*run.identity(STUDENT).inputs} == {"partition", *run.experts}
    assert all(weights.final for weights in Versions(run, None).newest() if weights)


def test_what_counts_is_what_was_accepted_whatever_its_island_writes(run: Run) -> None:
    for artifact in (*run.experts, ROUTER):
        accept_made(run, artifact)
    accepted = run.require(EXPERT).digest
    rewrite(run, negated_last)
    assert run.require(EXPERT).digest == accepted
    with pytest.raises(CorruptArtifact, match=r"experts/001/.*ema.safetensors: checksum differs"):
        load_models(run)
    assert status(run, EXPERT).unaccepted
    with pytest.raises(DriftError, match=r"another one was accepted before.*accept it \(replace\)"):
        accept_made(run, EXPERT)
    accept_made(run, EXPERT, replace=True)
    assert run.require(EXPERT).digest != accepted
    assert not status(run, EXPERT).unaccepted
    load_models(run)


@pytest.mark.parametrize("change", [lambda tensors: tensors[:-8], lambda _: b"{}"])
def test_what_is_no_network_is_not_accepted(run: Run, change: Callable[[bytes], bytes]) -> None:
    rewrite(run, change)
    with pytest.raises(CorruptArtifact, match="experts/001"):
        accept_made(run, EXPERT)
    assert run.manifest(EXPERT, accepted=True) is None


def test_an_altered_acceptance_is_named(run: Run) -> None:
    accept_made(run, EXPERT)
    key = f"accepted/{EXPERT}/{NAME}"
    fields = json.loads(run.store.read(key))
    run.store.write(key, json.dumps({**fields, "info": {}}).encode())
    with pytest.raises(CorruptArtifact, match=f"{key}: altered"):
        run.require(EXPERT)
    assert status(run, EXPERT).state == "damaged"


def test_the_command_accepts_and_status_tells_what_waits(run: Run) -> None:
    def ddm(*words: str) -> str:
        ended = CliRunner().invoke(main, [words[0], run.url, *words[1:]])
        assert ended.exit_code == 0, ended.output
        return ended.output

    waits = f"accept it with: ddm accept {run.url} expert 1"
    assert waits in ddm("status")
    assert "experts/001: accepted as " in ddm("accept", "expert", "1")
    assert waits not in ddm("status")
    assert "accept it with" in ddm("status")
    assert f"{MONOLITH}: accepted as " in ddm("accept", "--all")
    assert "accept it with" not in ddm("status")
    assert "nothing waits for acceptance" in ddm("accept", "--all")


def test_all_accepts_what_it_can_and_names_what_is_refused(run: Run) -> None:
    accept_made(run, EXPERT)
    rewrite(run, negated_last)
    ended = CliRunner().invoke(main, ["accept", run.url, "--all"])
    assert ended.exit_code == 1
    assert "warning: not accepted: " in ended.output and "another one was accepted before" in ended.output
    assert all(run.require(artifact) for artifact in (*run.experts, ROUTER, MONOLITH))
    load = [run.experts[0], ROUTER]
    assert not any(status(run, artifact).unaccepted for artifact in load) and status(run, EXPERT).unaccepted


def test_tidying_and_copying_go_by_what_was_accepted(run: Run, tmp_path: Path) -> None:
    for artifact in run.experts:
        accept_made(run, artifact)
    accepted = run.require(EXPERT)
    rewrite(run, negated_last)
    assert not [each for each in leftovers(run, milestones=True) if each.artifact == EXPERT]
    run.store.write(f"{EXPERT}/{TrainedInfo.of(accepted).weights}/ema.safetensors", original(run))
    copy(run, str(tmp_path / "there"), EXPERT, lambda share, key: None)
    brought = Run.open(str(tmp_path / "there"))
    assert brought.manifest(EXPERT) == accepted and not brought.manifest(EXPERT, accepted=True), "each site for itself"


def original(run: Run) -> bytes:
    """The expert's weights before they were rewritten."""
    manifest = run.manifest(EXPERT)
    assert manifest
    return negated_last(run.store.read(f"{EXPERT}/{TrainedInfo.of(manifest).weights}/ema.safetensors"))


def test_replayed_images_count_once_they_are_accepted(run: Run) -> None:
    info = info_of(replay(0))
    run.store.write(f"{replay(0)}/a.parquet", b"images")
    run.commit_records(replay(0), {"a.parquet": FileRecord.of(b"images")}, info)
    with pytest.raises(MissingArtifact, match="replay/cluster=000 is finished, but not accepted yet"):
        run.require(replay(0))
    assert f"ddm accept {run.url} replay 0" in describe(status(run, replay(0)), phrase)
    ended = CliRunner().invoke(main, ["accept", run.url, "replay", "0"])
    assert ended.exit_code == 0, ended.output
    assert run.require(replay(0))
    run.store.write(f"{replay(1)}/a.parquet", b"other")
    run.commit_records(replay(1), {"a.parquet": FileRecord.of(b"images")}, info)
    with pytest.raises(CorruptArtifact, match=r"replay/cluster=001/a.parquet: checksum differs"):
        accept_made(run, replay(1))


def test_a_run_that_accepts_at_once_needs_none(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"))
    assert not status(run, EXPERT).unaccepted
    ended = CliRunner().invoke(main, ["accept", run.url, "--all"])
    assert ended.exit_code == 1
    assert "accepts all that is finished at once" in ended.output
    load_models(run)
