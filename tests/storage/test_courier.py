"""Two stores with nothing in common give each other what a training needs, and what comes of it, by archives."""

import os
import shlex
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.config import load_recipe
from ddm_ray.errors import ArchiveError, ConfigError, CorruptArtifact, DriftError, MissingArtifact, StorageError
from ddm_ray.storage.archive import header, read_archive
from ddm_ray.storage.attempts import claim
from ddm_ray.storage.courier import pack, unpack
from ddm_ray.storage.graph import CENTROIDS, MONOLITH, PARTITION, ROUTER, Artifact, expert, owner_rows, shard
from ddm_ray.storage.info import TrainedInfo
from ddm_ray.storage.manifest import NAME
from ddm_ray.storage.published import Weights
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import CHUNK
from tests.conftest import ROOT
from tests.data.s3 import s3_server, upload
from tests.infos import commit_written, info_of
from tests.published import publish_weights
from tests.storage.archives import listing
from tests.storage.artifacts import flip_bit, write_and_commit

EXPERT = expert(1)
EMA = {"ema.safetensors": 2**30}
"""A name, and bytes that it has at most."""


def train(run: Run, artifact: Artifact, weights: bytes = b"ema") -> None:
    """Finish a job as a training does that gave these weights."""
    attempt = claim(run.store, artifact)
    files = {"ema.safetensors": weights, "model.json": b"{}"}
    prefix, manifest = publish_weights(attempt, 3, run.identity(artifact), files)
    records = {f"{prefix}/{name}": record for name, record in manifest.files.items()}
    run.commit_records(artifact, records, info_of(artifact, weights=prefix, attempts=attempt.number))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "carried.tar"


@pytest.fixture
def away(tmp_path: Path) -> str:
    """Where another site will have its run."""
    return str(tmp_path / "away/run")


def test_there_and_back(partitioned: Run, archive: Path, away: str) -> None:
    packed = pack(partitioned, EXPERT, archive)
    assert (packed.holds, packed.files) == ("inputs", 1)
    assert unpack(archive, away).written == 1
    island = Run.open(away)
    assert island.config == partitioned.config
    assert sorted(island.store.sizes("partition")) == [
        f"shards/cluster=001/{name}" for name in (NAME, "part-0.parquet")
    ]
    assert island.identity(EXPERT) == partitioned.identity(EXPERT)
    assert island.read(shard(1), "part-0.parquet") == b"rows of 1"

    train(island, EXPERT, b"from the island")
    packed = pack(island, EXPERT, archive)
    assert (packed.holds, packed.files) == ("result", 2)
    claim(partitioned.store, EXPERT)  # an attempt here has the number of the island's
    before = listing(Path(partitioned.url))
    unpack(archive, partitioned.url)
    new = listing(Path(partitioned.url)).keys() - before.keys()
    folder = TrainedInfo.of(partitioned.require(EXPERT)).weights
    files = {f"{EXPERT}/{folder}/{name}" for name in ("ema.safetensors", "model.json")}
    assert new == {f"{EXPERT}/{NAME}", *files, f"{EXPERT}/unpacked", f"{EXPERT}/{folder}"}
    assert Weights.finished(partitioned, EXPERT).read(partitioned, EMA) == [b"from the island"]


@pytest.mark.parametrize("artifact", [ROUTER, MONOLITH])
def test_what_trains_on_all_rows_gets_all(partitioned: Run, archive: Path, away: str, artifact: Artifact) -> None:
    write_and_commit(partitioned, CENTROIDS, {"c.safetensors": b"c"})
    parts = {name: partitioned.store.read(f"{PARTITION}/{name}") for name in partitioned.store.sizes(PARTITION)}
    partitioned.store.delete_one(f"{PARTITION}/{NAME}")
    listed = [name for name in parts if name.endswith(f"/{NAME}")]
    commit_written(partitioned, PARTITION, listed, info_of(PARTITION))
    pack(partitioned, artifact, archive)
    unpack(archive, away)
    island = Run.open(away)
    assert island.identity(artifact) == partitioned.identity(artifact)
    assert listing(Path(away, PARTITION)).items() >= {name: parts[name] for name in listed}.items()
    for part in (PARTITION, CENTROIDS, shard(0), shard(1)):
        assert island.require(part) == partitioned.require(part)


def test_again_is_harmless(partitioned: Run, archive: Path, away: str) -> None:
    train(partitioned, EXPERT)
    for holds in ("inputs", "result"):
        pack(partitioned, EXPERT, archive, holds)  # type: ignore[arg-type]
        unpack(archive, away)
        for url in (away, partitioned.url):
            before = listing(Path(url))
            assert unpack(archive, url).written == 0
            assert listing(Path(url)) == before, "also where it was packed"
    again = archive.read_bytes()
    pack(Run.open(away), EXPERT, archive)
    assert archive.read_bytes() == again, "from wherever it is packed"


def test_an_interrupted_one_is_continued(partitioned: Run, archive: Path, away: str) -> None:
    partitioned.store.delete_one(f"{shard(1)}/{NAME}")
    write_and_commit(partitioned, shard(1), {"a.parquet": b"a" * 600, "b.parquet": b"", "c.parquet": b"c"})
    partitioned.store.delete_one(f"{PARTITION}/{NAME}")
    pack(partitioned, EXPERT, archive)
    in_the_way = Path(away, shard(1), "b.parquet")
    in_the_way.mkdir(parents=True)
    with pytest.raises(StorageError, match=r"b\.parquet"):
        unpack(archive, away)
    assert Run.open(away).manifest(shard(1)) is None
    assert Path(away, shard(1), "a.parquet").read_bytes() == b"a" * 600
    in_the_way.rmdir()
    assert unpack(archive, away).written == 2
    assert Run.open(away).require(shard(1)) == partitioned.require(shard(1))


def test_other_bytes_in_its_place_are_named(partitioned: Run, archive: Path, away: str) -> None:
    pack(partitioned, EXPERT, archive)
    unpack(archive, away)
    path = Path(away, shard(1), "part-0.parquet")
    for spoil in (lambda: flip_bit(path), lambda: path.write_bytes(b"longer than it was")):
        spoil()
        before = listing(Path(away))
        with pytest.raises(ArchiveError, match=f"^{archive}: {path}: is there already, with other bytes"):
            unpack(archive, away)
        assert listing(Path(away)) == before


def test_an_archive_that_changes_after_its_verification_commits_nothing(
    partitioned: Run, archive: Path, away: str
) -> None:
    pack(partitioned, EXPERT, archive)

    def report(share: float, note: str) -> None:
        if note.startswith("writing"):
            flip_bit(archive, archive.read_bytes().index(b"rows of 1"))

    with pytest.raises(ArchiveError, match=r"part-0\.parquet: its checksum isn't its manifest's"):
        unpack(archive, away, report)
    assert [key for key, data in listing(Path(away)).items() if data is not None] == ["run.json"]


def test_what_is_packed_is_what_the_manifests_say(partitioned: Run, archive: Path) -> None:
    path = Path(partitioned.url, shard(1), "part-0.parquet")
    flip_bit(path)
    with pytest.raises(CorruptArtifact, match=f"{path}: cut short or altered"):
        pack(partitioned, EXPERT, archive)
    path.unlink()
    with pytest.raises(CorruptArtifact, match=f"{path}: gone"):
        pack(partitioned, EXPERT, archive)
    with pytest.raises(MissingArtifact, match=f"no finished {EXPERT} yet"):
        pack(partitioned, EXPERT, archive, "result")
    with pytest.raises(StorageError, match="nowhere"):
        pack(partitioned, expert(0), archive.parent / "nowhere/x.tar")
    assert [path.name for path in archive.parent.iterdir()] == ["run"], "no half of an archive"


def test_a_result_of_other_rows_is_drift(partitioned: Run, archive: Path, away: str) -> None:
    pack(partitioned, EXPERT, archive)
    unpack(archive, away)
    island = Run.open(away)
    island.store.delete(shard(1))
    write_and_commit(island, shard(1), {"part-0.parquet": b"other rows"})
    train(island, EXPERT)
    pack(island, EXPERT, archive)
    before = listing(Path(partitioned.url))
    with pytest.raises(DriftError, match=f"^{archive}: {EXPERT}/{NAME}: was made otherwise .*: input {shard(1)}: "):
        unpack(archive, partitioned.url)
    assert listing(Path(partitioned.url)) == before


def test_rows_of_an_owner_leave_only_if_that_is_said(tmp_path: Path, archive: Path) -> None:
    config = load_recipe("tiny", ("partition.method=given", "data.class_names=[]", "data.num_classes=10"))
    run = Run.create(str(tmp_path / "north"), config)
    write_and_commit(run, owner_rows(1), {"part-0.parquet": b"rows"})
    write_and_commit(run, shard(1), {"part-0.parquet": b"rows"})
    with pytest.raises(ConfigError, match="its owner's rows; if these may leave, pack them"):
        pack(run, EXPERT, archive)
    assert not archive.exists()
    assert pack(run, EXPERT, archive, "inputs").files == 1
    train(run, EXPERT)
    assert pack(run, EXPERT, archive).holds == "result"
    with pytest.raises(ConfigError, match="trains no router"):
        pack(run, ROUTER, archive)


def test_in_buckets(tmp_path: Path, partitioned: Run, archive: Path) -> None:
    with s3_server(tmp_path / "s3.log"):
        home, island = Run.open(upload(Path(partitioned.url), "home")), "s3://pictures/island"
        pack(home, EXPERT, archive)
        assert unpack(archive, island).written == 1
        assert unpack(archive, island).written == 0
        train(Run.open(island), EXPERT, b"trained there")
        pack(Run.open(island), EXPERT, archive)
        unpack(archive, home.url)
        assert Weights.finished(home, EXPERT).read(home, EMA) == [b"trained there"]


def test_large_files_come_in_pieces(partitioned: Run, archive: Path, away: str) -> None:
    weights = bytes(range(256)) * 2**15 + b"odd"
    train(partitioned, EXPERT, weights)
    pack(partitioned, EXPERT, archive)
    unpack(archive, away)
    island = Run.open(away)
    assert Weights.finished(island, EXPERT).read(island, EMA) == [weights]
    record = island.require(EXPERT).files[f"{TrainedInfo.of(island.require(EXPERT)).weights}/ema.safetensors"]
    with read_archive(archive) as reader:
        pieces = list(reader.chunks("ema.safetensors", archive.read_bytes().index(weights), record))
    assert [len(piece) for piece in pieces] == [CHUNK, CHUNK, 3]


def test_any_tar_program_reads_it(partitioned: Run, archive: Path) -> None:
    pack(partitioned, EXPERT, archive)
    with tarfile.open(archive, "r:") as tar:
        names = tar.getnames()
    assert names == ["ddm-archive.json", "run.json", *(f"{shard(1)}/{name}" for name in (NAME, "part-0.parquet"))]
    for size in (0, 7, 8 * 2**30, 48 * 10**9):
        entry = tarfile.TarInfo.frombuf(header(names[-1], size), "utf-8", "strict")
        assert (entry.name, entry.size, entry.type) == (names[-1], size, tarfile.REGTYPE)


def ddm(*arguments: str, code: int = 0) -> str:
    """What a command prints, here in this process."""
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == code, done.output
    return done.output


def test_the_commands_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the training, which needs Ray."""
    monkeypatch.chdir(tmp_path)
    home = Run.create("runs/three", load_recipe("tiny", ("partition.num_clusters=3", "expert.train.global_batch=12")))
    write_and_commit(home, shard(2), {"part-0.parquet": b"rows"})
    text = (ROOT / "cluster_configs/README.md").read_text().partition("by any courier")[2]
    lines = text.split("```")[1].strip().splitlines()
    assert [line.split()[1] for line in lines] == ["pack", "unpack", "train", "pack", "unpack"]
    printed = []
    for line in lines:
        verb, *arguments = shlex.split(line, comments=True)[1:]
        if verb == "train":
            assert arguments[1:] == ["expert", "2"]
            train(Run.open(arguments[0]), expert(2))
        else:
            printed.append(ddm(verb, *arguments))
    assert "out.tar: experts/002, what it is trained from: 1 file, 0.00 MB\n" in printed[0]
    assert "1 file of 1 written" in printed[1] and "next: ddm train island/three expert 2\n" in printed[1]
    assert "back.tar: experts/002, what was trained: 2 files, 0.00 MB\n" in printed[2]
    assert "experts/002: 3 steps, loss 0.25" in printed[3]
    assert "all there already" in ddm("unpack", "back.tar", "runs/three")


def test_mistakes_are_lines(partitioned: Run, archive: Path, away: str) -> None:
    pack_one = ("pack", partitioned.url, "expert", "1", "-o", str(archive))
    assert "choose one" in ddm(*pack_one, "--inputs", "--result", code=1)
    assert "no finished experts/001 yet; make it with: ddm train" in ddm(*pack_one, "--result", code=1)
    assert "pack expert 7: this run has experts 0 to 1" in ddm(
        "pack", partitioned.url, "expert", "7", "-o", str(archive), code=1
    )
    train(partitioned, EXPERT)
    assert "what it is trained from" in ddm(*pack_one, "--inputs")
    archive.write_bytes(b"\x1f\x8b" + bytes(600))
    assert f"error: {archive}: is compressed (gzip)" in ddm("unpack", str(archive), away, code=1)
    assert "No such file" in ddm("unpack", str(archive.with_name("none.tar")), away, code=1)
    os.mkfifo(pipe := archive.with_name("pipe.tar"))
    for other in (ROOT, pipe):
        assert "isn't a file" in ddm("unpack", str(other), away, code=1)
