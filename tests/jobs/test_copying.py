"""Two stores with nothing in common give each other what a training needs, and what comes of it, by copies."""

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.config import load_recipe
from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError, MissingArtifact, StorageError
from ddm_ray.jobs import copying
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.copying import Copied
from ddm_ray.jobs.published import Weights
from ddm_ray.run.graph import CENTROIDS, MONOLITH, PARTITION, ROUTER, ROWS, STUDENT, Artifact, expert, shard
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.manifest import NAME, sha256
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import canonical
from ddm_ray.store.store import Store
from tests.conftest import ROOT
from tests.data.s3 import s3_server, upload
from tests.infos import commit_written, info_of
from tests.published import publish_weights
from tests.run.artifacts import flip_bit, write_and_commit

pytestmark = pytest.mark.contract

EXPERT = expert(1)
EMA = {"ema.safetensors": 2**30}
"""A name, and bytes that it has at most."""
GIVEN = ("partition.method=given", "data.class_names=[]", "data.num_classes=10", "router.replay=10")


def copy(run: Run, url: str, artifact: Artifact | None = None) -> list[Copied]:
    return copying.copy(run, url, artifact, lambda share, key: None)


def files(url: str) -> dict[str, bytes]:
    return {path.relative_to(url).as_posix(): path.read_bytes() for path in Path(url).rglob("*") if path.is_file()}


def train(run: Run, artifact: Artifact, weights: bytes = b"ema") -> None:
    """Finish a job as a training does that gave these weights."""
    attempt = claim(run.store, artifact)
    content = {"ema.safetensors": weights, "model.json": b"{}"}
    prefix, manifest = publish_weights(attempt, 3, run.identity(artifact), content)
    records = {f"{prefix}/{name}": record for name, record in manifest.files.items()}
    run.commit_records(artifact, records, info_of(artifact, weights=prefix, attempts=attempt.number))


def list_shards(run: Run) -> None:
    """Have the partition list its centroids and shards, as the stage does."""
    write_and_commit(run, CENTROIDS, {"c.safetensors": b"c"})
    listed = [name for name in run.store.sizes(PARTITION) if name.endswith(f"/{NAME}")]
    run.store.delete_one(f"{PARTITION}/{NAME}")
    commit_written(run, PARTITION, listed, info_of(PARTITION))


@pytest.fixture
def away(tmp_path: Path) -> str:
    """Where another site will have its run."""
    return str(tmp_path / "away/run")


def test_there_and_back(partitioned: Run, away: str) -> None:
    assert copy(partitioned, away, shard(1)) == [Copied(shard(1), 1, 9, 1)]
    island = Run.open(away)
    assert files(away).keys() == {"run.json", f"{shard(1)}/{NAME}", f"{shard(1)}/part-0.parquet"}
    assert island.config == partitioned.config and island.identity(EXPERT) == partitioned.identity(EXPERT)
    train(island, EXPERT, b"from the island")
    assert [each.artifact for each in copy(island, partitioned.url)] == [EXPERT], "shards come with their partition"
    assert Weights.finished(partitioned, EXPERT).read(partitioned, EMA) == [b"from the island"]
    assert partitioned.manifest(EXPERT) == island.manifest(EXPERT)
    before = files(partitioned.url)
    assert copy(island, partitioned.url, EXPERT) == [Copied(EXPERT, 2, 17, 0)]
    assert copy(island, partitioned.url, shard(1)) == [Copied(shard(1), 1, 9, 0)]
    assert files(partitioned.url) == before


def test_weights_do_not_mix_with_those_of_an_attempt_of_their_number(partitioned: Run, away: str) -> None:
    copy(partitioned, away, shard(1))
    train(Run.open(away), EXPERT, b"from the island")
    claim(partitioned.store, EXPERT)
    before = files(partitioned.url)
    for written in (2, 0):
        assert copy(Run.open(away), partitioned.url, EXPERT) == [Copied(EXPERT, 2, 17, written)]
    folder = TrainedInfo.of(partitioned.require(EXPERT)).weights
    assert folder.startswith("copied/")
    new = {f"{EXPERT}/{name}" for name in (NAME, f"{folder}/ema.safetensors", f"{folder}/model.json")}
    assert files(partitioned.url).keys() - before.keys() == new
    assert Weights.finished(partitioned, EXPERT).read(partitioned, EMA) == [b"from the island"]


def test_a_partition_comes_with_what_it_lists(partitioned: Run, away: str) -> None:
    list_shards(partitioned)
    copied = copy(partitioned, away, PARTITION)
    assert [each.artifact for each in copied] == [CENTROIDS, shard(0), shard(1), PARTITION]
    for part in (PARTITION, CENTROIDS, shard(0), shard(1)):
        assert Run.open(away).require(part) == partitioned.require(part)
    assert Run.open(away).identity(ROUTER) == partitioned.identity(ROUTER)
    flip_bit(Path(partitioned.url, CENTROIDS, "c.safetensors"))
    partitioned.store.delete_one(f"{CENTROIDS}/{NAME}")
    write_and_commit(partitioned, CENTROIDS, {"c.safetensors": b"another"})
    with pytest.raises(CorruptArtifact, match=f"{CENTROIDS}/{NAME}: isn't the one that another artifact's manifest"):
        copy(partitioned, away, PARTITION)


def test_a_whole_run_is_copied(partitioned: Run, away: str) -> None:
    list_shards(partitioned)
    for artifact in (expert(0), EXPERT, ROUTER, MONOLITH, STUDENT):
        train(partitioned, artifact)
    claim(partitioned.store, EXPERT)
    copied = [each.artifact for each in copy(partitioned, away)]
    assert copied == [ROWS, CENTROIDS, shard(0), shard(1), PARTITION, expert(0), EXPERT, ROUTER, MONOLITH, STUDENT]
    backup = Run.open(away)
    assert all(backup.require(artifact) == partitioned.require(artifact) for artifact in copied)
    assert not backup.store.sizes(f"{EXPERT}/attempts/0002")


def test_an_interrupted_one_is_continued(partitioned: Run, away: str) -> None:
    partitioned.store.delete_one(f"{shard(1)}/{NAME}")
    partitioned.store.delete_one(f"{PARTITION}/{NAME}")
    write_and_commit(partitioned, shard(1), {"a.parquet": b"a" * 600, "b.parquet": b"", "c.parquet": b"c"})
    in_the_way = Path(away, shard(1), "b.parquet")
    in_the_way.mkdir(parents=True)
    with pytest.raises(StorageError, match=r"b\.parquet"):
        copy(partitioned, away, shard(1))
    assert Run.open(away).manifest(shard(1)) is None
    assert Path(away, shard(1), "a.parquet").read_bytes() == b"a" * 600
    in_the_way.rmdir()
    assert copy(partitioned, away, shard(1))[0].written < 3
    assert Run.open(away).require(shard(1)) == partitioned.require(shard(1))
    train(partitioned, EXPERT)
    names = [f"{EXPERT}/{name}" for name in partitioned.require(EXPERT).files]
    for name in names:
        (in_the_way := Path(away, name)).mkdir(parents=True)
        with pytest.raises(StorageError, match=in_the_way.name):
            copy(partitioned, away, EXPERT)
        in_the_way.rmdir()
    assert copy(partitioned, away, EXPERT)[0].written < 2, "into the same folder as before"
    assert files(away).keys() >= {*names} and not Path(away, EXPERT, "copied").exists()


def test_other_bytes_in_its_place_are_named(partitioned: Run, away: str) -> None:
    copy(partitioned, away, shard(1))
    Path(away, shard(1), NAME).unlink()
    path = Path(away, shard(1), "part-0.parquet")
    for spoil in (lambda: flip_bit(path), lambda: path.write_bytes(b"longer than it was")):
        spoil()
        before = files(away)
        with pytest.raises(CorruptArtifact, match=f"^{path}: is there already, with other bytes"):
            copy(partitioned, away, shard(1))
        assert files(away) == before


def test_what_is_copied_is_what_the_manifests_say(partitioned: Run, away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a few bytes: nothing of a file that is altered gets its name."""
    monkeypatch.setattr(copying, "PART", 4)
    path = Path(partitioned.url, shard(1), "part-0.parquet")
    for position in (0, -1):
        flip_bit(path, position)
        with pytest.raises(CorruptArtifact, match=f"{path}: cut short or altered"):
            copy(partitioned, away, shard(1))
        assert files(away).keys() == {"run.json"}
        flip_bit(path, position)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptArtifact, match=f"{path}: cut short or altered"):
        copy(partitioned, away, shard(1))
    path.unlink()
    with pytest.raises(CorruptArtifact, match=f"{path}: gone"):
        copy(partitioned, away, shard(1))
    with pytest.raises(MissingArtifact, match=f"no finished {EXPERT} yet"):
        copy(partitioned, away, EXPERT)
    assert copy(partitioned, away, shard(0))[0].written == 1, "in three parts"


def test_another_run_and_another_result_are_refused(partitioned: Run, away: str) -> None:
    other = Run.create(away, load_recipe("tiny", ("partition.num_clusters=4",)))
    with pytest.raises(DriftError, match="is another run"):
        copy(partitioned, other.url, shard(1))
    (home := Path(away).with_name("home")).mkdir()
    island = Run.open(copied_to(partitioned, str(home), shard(1)))
    train(island, EXPERT, b"one")
    train(partitioned, EXPERT, b"another")
    before = files(partitioned.url)
    with pytest.raises(DriftError, match=f"{EXPERT}: another one is there already, and the first one counts; delete"):
        copy(island, partitioned.url, EXPERT)
    assert files(partitioned.url) == before


def copied_to(run: Run, url: str, artifact: Artifact) -> str:
    copy(run, url, artifact)
    return url


def test_a_result_of_other_rows_is_drift(partitioned: Run, away: str) -> None:
    island = Run.open(copied_to(partitioned, away, shard(1)))
    island.store.delete(shard(1))
    write_and_commit(island, shard(1), {"part-0.parquet": b"other rows"})
    train(island, EXPERT)
    before = files(partitioned.url)
    with pytest.raises(DriftError, match=f"{EXPERT} was made otherwise .*: input {shard(1)}: "):
        copy(island, partitioned.url, EXPERT)
    assert files(partitioned.url) == before


def test_no_row_leaves_its_owner(tmp_path: Path, away: str) -> None:
    """Whatever is asked for: of a shard its manifest leaves, and of what is made of rows only what was trained."""
    run = Run.create(str(tmp_path / "north"), load_recipe("tiny", GIVEN))
    rows = b"rows of an owner"
    for kept in ("rows/cluster=001", shard(1), "references/a", "eval/a"):
        write_and_commit(run, Artifact(kept), {"part-0.parquet": rows})
    train(run, EXPERT)
    for name in ("rows/cluster=001", "references/a", "eval/a", "partition/report"):
        with pytest.raises(ConfigError, match=f"{name} is made of its owner's rows, and stays where it is"):
            copy(run, away, Artifact(name))
    with pytest.raises(MissingArtifact):
        copy(run, away, PARTITION)
    for artifact in (shard(1), EXPERT, None):
        copy(run, away, artifact)
    kept = [f"{EXPERT}/{name}" for name in run.require(EXPERT).files]
    assert files(away).keys() == {"run.json", f"{shard(1)}/{NAME}", f"{EXPERT}/{NAME}", *kept}
    assert not any(rows in data for data in files(away).values())


@pytest.mark.parametrize("name", [NAME, f"x/{NAME}", f"shards/cluster=009/{NAME}", f"../{NAME}"])
def test_a_manifest_that_names_what_it_may_not_writes_nothing(partitioned: Run, away: str, name: str) -> None:
    path = Path(partitioned.url, PARTITION, NAME)
    body = json.loads(path.read_text())
    body["files"][name] = next(iter(body["files"].values()))
    del body["checksum"]
    path.write_text(json.dumps({**body, "checksum": sha256(canonical(body))}))
    with pytest.raises(CorruptArtifact):
        copy(partitioned, away, PARTITION)
    assert not Path(away).exists() and sorted(Path(away).parents[1].iterdir()) == [Path(partitioned.url)]


def test_in_buckets(tmp_path: Path, partitioned: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a run that is there nothing but the artifact is written: an island's key may allow no more."""
    with s3_server(tmp_path / "s3.log"):
        home, island = Run.open(upload(Path(partitioned.url), "home")), "s3://pictures/island"
        for written in (1, 0):
            assert copy(home, island, shard(1))[0].written == written
        train(Run.open(island), EXPERT, b"trained there")
        monkeypatch.delattr(Store, "require_create")
        copy(Run.open(island), home.url, EXPERT)
        assert Weights.finished(home, EXPERT).read(home, EMA) == [b"trained there"]


def ddm(*arguments: str, code: int = 0) -> str:
    """What a command prints, here in this process."""
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == code, done.output
    return done.output


def test_the_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the training, which needs Ray."""
    monkeypatch.chdir(tmp_path)
    home = Run.create("runs/three", load_recipe("tiny", ("partition.num_clusters=3", "expert.train.batch=4")))
    write_and_commit(home, shard(2), {"part-0.parquet": b"rows"})
    text = (ROOT / "cluster_configs/README.md").read_text().partition("can't reach the bucket")[2]
    lines = text.split("```")[1].strip().splitlines()
    assert [line.split()[1] for line in lines] == ["copy", "train", "copy"]
    printed = []
    for line in lines:
        verb, *arguments = shlex.split(line, comments=True)[1:]
        if verb == "train":
            assert arguments[1:] == ["expert", "2"]
            train(Run.open(arguments[0]), expert(2))
        else:
            printed.append(ddm(verb, *arguments))
    assert f"{shard(2)}: 4 B, 1 of 1 files written\n" in printed[0]
    assert "experts/002: 5 B, 2 of 2 files written\n" in printed[1]
    assert home.require(expert(2))
    assert "experts/002: 5 B, nothing to write\n" in ddm(verb, *arguments)


def test_mistakes_are_lines(partitioned: Run, away: str) -> None:
    assert "'expert' is no artifact of a run; write it as experts/003" in ddm(
        "copy", partitioned.url, away, "expert", code=1
    )
    assert "no finished experts/001 yet; make it with: ddm train" in ddm(
        "copy", partitioned.url, away, "experts/001", code=1
    )
    assert "is not a run" in ddm("copy", away, partitioned.url, code=1)
