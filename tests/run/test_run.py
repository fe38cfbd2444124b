"""A run never changes, knows what each artifact is made under, and refuses what was made otherwise."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddm_ray.cli.fixes import phrase
from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError, MissingArtifact, RunError
from ddm_ray.placement import ISLAND_FIELDS
from ddm_ray.run.graph import MONOLITH, PARTITION, ROUTER, ROWS, STUDENT, Artifact, evaluation, expert, shard
from ddm_ray.run.manifest import SCHEMA, FileRecord, canonical, sha256
from ddm_ray.run.run import Run
from tests.infos import commit_written, info_of
from tests.run.artifacts import flip_bit, write_and_commit

ALL = (ROWS, PARTITION, shard(1), expert(1), ROUTER, MONOLITH, evaluation("demo"))


def sign(body: dict[str, Any]) -> bytes:
    return json.dumps({**body, "checksum": sha256(canonical(body))}).encode()


def test_creating_a_run_again_is_a_no_op(tmp_path: Path, config: RunConfig) -> None:
    url = str(tmp_path / "my run #1 100%")
    run = Run.create(url, config)
    written = (tmp_path / "my run #1 100%" / "run.json").read_bytes()
    assert Run.create(url, config).config == config == Run.open(url).config
    assert (tmp_path / "my run #1 100%" / "run.json").read_bytes() == written
    assert run.url == url
    assert run.experts == ("experts/000", "experts/001")


def test_creating_another_run_in_its_place_is_drift(run: Run) -> None:
    other = load_recipe("tiny", ("expert.train.steps=400", "embedder.checkpoint=dino.pt", "data.heldout=0.2"))
    with pytest.raises(DriftError) as failure:
        Run.create(run.url, other)
    assert str(failure.value) == (
        f'{run.url} is another run: data.heldout: 0.1 -> 0.2; embedder.checkpoint: null -> "dino.pt"; '
        "expert.train.steps: 300 -> 400; choose another folder for this one"
    )
    assert Run.open(run.url).config == run.config


def test_a_long_drift_is_cut_short(run: Run) -> None:
    changes = [f"expert.train.{field}" for field in ("steps", "seed", "warmup_steps", "batch")]
    other = load_recipe("tiny", (*(f"{field}=64" for field in changes), "name=b", "sample.steps=3"))
    with pytest.raises(DriftError, match="and 2 more; choose another folder"):
        Run.create(run.url, other)


@pytest.mark.parametrize("model_args", ["{depths: {1: 2, 10: 3, 9: 4}, drop: 0.1}", "{when: 2026-11-20, out: [1, 2]}"])
def test_any_model_args_survive_storage(tmp_path: Path, model_args: str) -> None:
    config = load_recipe("tiny", (f"embedder.model_args={model_args}",))
    run = Run.create(str(tmp_path), config)
    Run.create(str(tmp_path), config)
    write_and_commit(run, ROWS, {"part-0.parquet": b"rows"})
    assert Run.open(str(tmp_path)).finished(ROWS)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"^{tmp_path} is not a run: it has no run.json; begin a run there"):
        Run.open(str(tmp_path))


def test_a_file_is_no_run(tmp_path: Path, config: RunConfig) -> None:
    url = tmp_path / "notes.txt"
    url.write_text("notes")
    for attempt in (lambda: Run.open(str(url)), lambda: Run.create(str(url), config)):
        with pytest.raises(RunError, match="Not a directory") as failure:
            attempt()
        assert "\n" not in str(failure.value)
        assert "Debug" not in str(failure.value)
    assert url.read_text() == "notes"


def test_a_name_that_storage_refuses_is_no_run(config: RunConfig) -> None:
    with pytest.raises(RunError, match="no run can be made here") as failure:
        Run.create("/tmp/a\tb", config)
    assert "\n" not in str(failure.value)


def test_a_damaged_run_file_is_refused(run: Run) -> None:
    path = Path(run.url) / "run.json"
    run_json = path.read_bytes().rstrip()
    for position in range(0, len(run_json), 31):
        flip_bit(path, position)
        with pytest.raises(CorruptArtifact, match=f"^{path}: (altered since it was written|not whole)"):
            Run.open(run.url)
        path.write_bytes(run_json[:position])
        with pytest.raises(CorruptArtifact, match=f"^{path}: not whole; restore it, or begin a new run"):
            Run.open(run.url)
        path.write_bytes(run_json)
    assert Run.open(run.url).config == run.config


def test_another_schema_or_form_of_run_file(run: Run) -> None:
    path = Path(run.url) / "run.json"
    fields = run.config.model_dump(mode="json")
    path.write_bytes(sign({"schema": 1, "config": fields}))
    reads = f"this version of ddm-ray reads {SCHEMA}; use the version that wrote it"
    with pytest.raises(RunError, match=f"^{path}: schema 1, {reads}$"):
        Run.open(run.url)
    path.write_bytes(sign({"schema": SCHEMA, "config": {**fields, "nmae": "x"}}))
    with pytest.raises(ConfigError, match=f"^{path}: nmae: unknown key; did you mean name\\?$"):
        Run.open(run.url)
    for body in ({"schema": SCHEMA}, {"config": fields}, {}):
        path.write_bytes(sign(body))
        with pytest.raises(CorruptArtifact, match="is the record of something else"):
            Run.open(run.url)


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("name=other", ()),
        ("data.heldout=0.2", (ROWS, expert(1), ROUTER, MONOLITH)),
        ("embedder.dim=4", (ROWS,)),
        ("partition.num_fine=32", (PARTITION, shard(1))),
        ("partition.num_clusters=4", (PARTITION, shard(1), ROUTER, MONOLITH)),
        ("expert.train.steps=400", (expert(1), MONOLITH)),
        ("expert.train.batch=32", (expert(1), MONOLITH)),
        ("expert.train.precision=bf16", (expert(1), MONOLITH)),
        ("expert.model.width=64", (expert(1), MONOLITH)),
        ("router.train.steps=400", (ROUTER,)),
        ("sample.steps=11", (evaluation("demo"),)),
        ("evaluate.num_samples=65", (evaluation("demo"),)),
    ],
)
def test_which_artifacts_a_field_identifies(tmp_path: Path, run: Run, setting: str, changed: tuple[str, ...]) -> None:
    other = Run.create(str(tmp_path / "other"), load_recipe("tiny", (setting,)))
    differing = [name for name in ALL if run.identity(name).fingerprint != other.identity(name).fingerprint]
    assert differing == list(changed)


def test_placement_never_enters_identity(run: Run) -> None:
    def names(value: Any) -> set[str]:
        return (
            set(value) | {name for part in value.values() for name in names(part)} if isinstance(value, dict) else set()
        )

    for artifact in ALL:
        assert not names(run.identity(artifact).fields) & ISLAND_FIELDS.keys()


def test_rows_made_anew_are_drift_for_the_partition_and_its_readers(partitioned: Run) -> None:
    run = partitioned
    write_and_commit(run, ROUTER, {"ema.safetensors": b"router"})
    assert run.finished(PARTITION)
    assert run.finished(ROUTER)
    before = run.manifest(ROWS)
    run.store.delete(ROWS)
    assert run.finished(PARTITION), "inputs that aren't here don't count"
    write_and_commit(run, ROWS, {"part-0.parquet": b"rows"})
    assert run.finished(PARTITION), "the same bytes are the same rows"
    run.store.delete(ROWS)
    write_and_commit(run, ROWS, {"part-0.parquet": b"ROWS"})
    after = run.manifest(ROWS)
    assert before
    assert after
    with pytest.raises(DriftError) as failure:
        run.finished(PARTITION)
    assert str(failure.value) == (
        f"{run.url}/partition was made otherwise: input rows: {before.digest} -> {after.digest};"
        f" delete {run.url}/partition and make partition again"
    )
    run.store.delete(PARTITION)
    write_and_commit(run, PARTITION, {"centroids.safetensors": b"centroids"})
    with pytest.raises(DriftError, match="router was made otherwise: input partition"):
        run.finished(ROUTER)  # equal centroids, but of other rows


def test_an_artifact_made_under_another_configuration_is_drift(tmp_path: Path, run: Run) -> None:
    other = Run.create(str(tmp_path / "other"), load_recipe("tiny", ("expert.train.steps=400",)))
    write_and_commit(other, MONOLITH, {"ema.safetensors": b"monolith"})
    shutil.copytree(Path(other.url) / MONOLITH, Path(run.url) / MONOLITH)
    for ask in (run.finished, run.require):
        with pytest.raises(DriftError, match=r"monolith was made otherwise: expert\.train.steps: 400 -> 300; delete"):
            ask(MONOLITH)


def test_a_field_that_has_been_added_since_is_no_drift(run: Run) -> None:
    """An older version knew neither, and one by another name."""
    identity = run.identity(evaluation("old"))
    del identity.fields["sample"]["router_temperature"], identity.fields["evaluate"]["seed"]
    identity.fields["sample"]["guidance"] = identity.fields["sample"].pop("guidance_kind")
    info = info_of(evaluation("old"))
    run.commit_records(evaluation("old"), {}, info, identity=identity)
    assert run.finished(evaluation("old"))
    identity.fields["sample"]["steps"] = 3
    run.commit_records(evaluation("older"), {}, info, identity=identity)
    with pytest.raises(DriftError, match=r"sample\.steps: 3 -> 10; delete"):
        run.finished(evaluation("older"))


@pytest.mark.parametrize(
    ("artifact", "commands"),
    [
        (ROWS, ["prepare {}"]),
        (PARTITION, ["prepare {}", "partition {}"]),
        (shard(1), ["prepare {}", "partition {}"]),
        (expert(1), ["prepare {}", "partition {}", "train {} all"]),
        (ROUTER, ["prepare {}", "partition {}", "train {} all"]),
        (MONOLITH, ["prepare {}", "partition {}", "train {} monolith"]),
        (STUDENT, ["prepare {}", "partition {}", "train {} all", "train {} student"]),
        (evaluation("demo"), ["prepare {}", "partition {}", "train {} all", "evaluate {} --name demo"]),
    ],
)
def test_a_missing_artifact_names_the_first_command_that_leads_to_it(
    run: Run, artifact: Artifact, commands: list[str]
) -> None:
    made = [(ROWS,), (PARTITION, shard(0), shard(1)), (*run.experts, ROUTER)]
    for number, command in enumerate(commands):
        assert run.finished(artifact) is run.manifest(artifact) is None
        with pytest.raises(MissingArtifact) as failure:
            run.require(artifact)
        last = command == commands[-1]
        how = f"{'make it' if last else 'begin'} with: ddm {command.format(run.url)}"
        assert failure.value.text(phrase) == f"{run.url} has no finished {artifact} yet; {how}"
        for each in () if last else made[number]:
            write_and_commit(run, each, {})


def test_the_last_model_that_is_missing_is_trained_alone(run: Run) -> None:
    for made in (ROWS, PARTITION, shard(0), shard(1), expert(0), ROUTER):
        write_and_commit(run, made, {})
    for asked, begins in ((expert(1), "make it"), (STUDENT, "begin")):
        with pytest.raises(MissingArtifact) as failure:
            run.require(asked)
        assert failure.value.text(phrase).endswith(f"; {begins} with: ddm train {run.url} expert 1")


def test_one_shard_is_all_a_site_needs(tmp_path: Path, partitioned: Run) -> None:
    home, site = Path(partitioned.url), tmp_path / "site"
    (site / shard(1)).parent.mkdir(parents=True)
    shutil.copy(home / "run.json", site)
    shutil.copytree(home / shard(1), site / shard(1))
    site_run = Run.open(str(site))
    assert site_run.read(shard(1), "part-0.parquet") == b"rows of 1"
    assert site_run.identity(expert(1)) == partitioned.identity(expert(1))
    assert list(site_run.identity(expert(1)).inputs) == [shard(1)]
    write_and_commit(site_run, expert(1), {"attempts/0001/weights/ema.safetensors": b"expert 1"})
    assert site_run.require(expert(1)).identity == site_run.identity(expert(1))

    shutil.copytree(site / expert(1), home / expert(1))
    assert partitioned.read(expert(1), "attempts/0001/weights/ema.safetensors") == b"expert 1"
    partitioned.store.delete(shard(1))
    write_and_commit(partitioned, shard(1), {"part-0.parquet": b"other rows of 1"})
    with pytest.raises(DriftError, match=r"experts/001 was made otherwise: input partition/shards/cluster=001"):
        partitioned.require(expert(1))


def test_an_artifact_in_anothers_place_is_refused(partitioned: Run) -> None:
    """Islands copy folders by hand: expert 1's in the place of expert 0 would sample wrongly without a word."""
    run = partitioned
    write_and_commit(run, expert(1), {"ema.safetensors": b"one"})
    (Path(run.url) / expert(1)).rename(Path(run.url) / expert(0))
    with pytest.raises(CorruptArtifact, match=r"experts/000/_MANIFEST.json: is that of experts/001"):
        run.finished(expert(0))


def test_reading_verifies(partitioned: Run) -> None:
    run, path = partitioned, Path(partitioned.url) / ROWS / "part-0.parquet"
    assert run.read(ROWS, "part-0.parquet") == b"rows"
    flip_bit(path)
    with pytest.raises(CorruptArtifact, match=f"^{path}: checksum differs"):
        run.read(ROWS, "part-0.parquet")
    path.write_bytes(b"row")
    with pytest.raises(CorruptArtifact, match=f"^{path}: 3 bytes, its manifest says 4"):
        run.read(ROWS, "part-0.parquet")
    path.unlink()
    with pytest.raises(
        CorruptArtifact, match=f"^{path}: gone, though its manifest lists it; mend rows, as an examination"
    ):
        run.read(ROWS, "part-0.parquet")
    flip_bit(path.parent / "_MANIFEST.json", 40)
    with pytest.raises(CorruptArtifact, match=f"^{path.parent}/_MANIFEST.json: "):
        run.finished(ROWS)


def test_the_first_commit_counts(run: Run) -> None:
    run.store.write(f"{ROWS}/part-0.parquet", b"rows")
    first = commit_written(run, ROWS, ["part-0.parquet"], info_of(ROWS, rows=1))
    assert first.files == {"part-0.parquet": FileRecord(4, sha256(b"rows"))}
    assert first == run.require(ROWS)
    again = Run.open(run.url).commit_records(
        ROWS, {"part-1.parquet": FileRecord(1, sha256(b"x"))}, info_of(ROWS, rows=2)
    )
    assert again == first == run.manifest(ROWS)


def test_committing_beside_a_rival_of_another_configuration_is_drift(tmp_path: Path, run: Run) -> None:
    other = Run.create(str(tmp_path / "other"), load_recipe("tiny", ("embedder.dim=4",)))
    write_and_commit(other, ROWS, {"part-0.parquet": b"rows"})
    shutil.copytree(Path(other.url) / ROWS, Path(run.url) / ROWS)
    with pytest.raises(DriftError, match=r"rows was made otherwise: embedder\.dim: 4 -> 8"):
        commit_written(run, ROWS, ["part-0.parquet"], info_of(ROWS))
