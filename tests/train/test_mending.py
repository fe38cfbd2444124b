"""A damaged file of a finished run: all who need it say so by name, and mending gives back the run's very bytes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.data.partition.stage import partition
from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.evaluate.run import evaluate
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.damage import damages
from ddm_ray.jobs.examination import examine
from ddm_ray.jobs.mending import delete_records, drop_if_different, mending
from ddm_ray.jobs.status import require_sound, survey
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import CENTROIDS, PARTITION, REPORT, ROUTER, ROWS, STUDENT, Artifact, evaluation, expert, shard
from ddm_ray.run.info import RowsInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_trained
from tests.data.damage import Folder
from tests.data.damaged_runs import resume
from tests.data.rows import commit_rows
from tests.data.s3 import BUCKET, s3_server, upload
from tests.run.artifacts import flip_bit
from tests.train.conftest import SHORT

pytestmark = pytest.mark.contract

EXPERT = expert(0)
WEIGHTS = "attempts/0001/weights/step-000000012"
STATE = "attempts/0001/state/step-000000012"
PUBLISHED = [f"{WEIGHTS}/{name}" for name in ("ema.safetensors", "model.json", "curve.safetensors")]
CUT: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "flipped": flip_bit,
}
STAGES: dict[str, Callable[[Run], object]] = {
    "prepare": resume,
    "partition": partition,
    "evaluate": lambda run: evaluate(run, "demo"),
}
FEW = ("evaluate.num_samples=8", "evaluate.strategies=[once]", "evaluate.real_rows=40", "sample.steps=2")


@pytest.fixture(scope="module")
def finished(world_of_one: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rows, partition, experts, router and an evaluation, all as the commands make them. Only to be copied."""
    from ddm_ray.train import worker

    run = commit_rows(str(tmp_path_factory.mktemp("finished") / "run"), (*SHORT, *FEW))
    partition(run)
    for artifact in (*run.experts, ROUTER):
        worker.train(run.url, artifact, TrainPlacement())
    evaluate(run, "demo")
    return run


@pytest.fixture
def run(finished: Run, tmp_path: Path) -> Run:
    shutil.copytree(finished.url, tmp_path / "run")
    return Run.open(str(tmp_path / "run"))


def doctor(run: Run, *options: str) -> tuple[int, str]:
    """Exit code, and the lines on the run without those on this machine."""
    ended = CliRunner().invoke(main, ["doctor", run.url, *options])
    assert ended.exception is None or isinstance(ended.exception, SystemExit)
    return ended.exit_code, ended.output


def damaged_files(run: Run, deep: bool) -> list[tuple[str, str]]:
    return [(finding.artifact, name) for finding in examine(run, deep) for name in finding.names]


def file_of(run: Run, artifact: Artifact, pattern: str) -> Path:
    return min((Path(run.url) / artifact).glob(pattern))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in PUBLISHED for damage in CUT),
        *(("_MANIFEST.json", damage) for damage in ("cut", "flipped")),  # a job without one isn't finished
    ],
)
def test_a_trained_model_is_written_again_without_a_step_of_training(run: Run, name: str, damage: str) -> None:
    before = Folder(Path(run.url))
    CUT[damage](Path(run.url) / EXPERT / name)
    code, words = doctor(run, "--deep")
    assert code == 1 and f"{EXPERT} " in words and name in words and "delete" not in words
    assert f"ddm doctor {run.url} --deep --mend" in words
    code, words = doctor(run, "--deep", "--mend")
    assert (code, damaged_files(run, deep=True)) == (0, []), words
    assert before.now() == before.files


@pytest.mark.parametrize("damage", CUT)
@pytest.mark.parametrize(
    ("artifact", "pattern"),
    [
        (ROWS, "part-*-000001-*"),
        (ROWS, "_parts/*-000001.json"),
        (ROWS, "_embedder/*.safetensors"),
        (ROWS, "_embedder/*.json"),
        (ROWS, "_plan/*.json"),
        (shard(0), "train-*"),
        (shard(1), "heldout-*"),
        (shard(1), "_MANIFEST.json"),
        (CENTROIDS, "centroids-*"),
        (CENTROIDS, "_MANIFEST.json"),
        (REPORT, "report.html"),
        (evaluation("demo"), "report.html"),
        (evaluation("demo"), "_parts/*"),
        (evaluation("demo"), "_report/*.json"),
    ],
)
def test_what_stages_made_is_made_again_and_nothing_sound_is_deleted(
    run: Run, artifact: Artifact, pattern: str, damage: str
) -> None:
    before = Folder(Path(run.url))
    path = file_of(run, artifact, pattern)
    key = path.relative_to(run.url).as_posix()
    CUT[damage](path)
    [finding] = [each for each in examine(run, deep=True) if each.error]
    assert finding.artifact == artifact
    mended = mending(run, finding, deep=True)
    assert mended and delete_records(run, mended, deep=True)
    lost = before.files.keys() - before.now().keys() - {key}
    assert lost <= {*mended.delete} and all(each.endswith(".json") for each in lost)
    STAGES[mended.make.stage](Run.open(run.url))
    assert not delete_records(run, mended, deep=True), "who comes second deletes nothing"
    timed = {f"{artifact}/_MANIFEST.json", key} if artifact.kind == "evaluation" else {*()}  # a record says how long
    timed |= {key} if "_plan/" in key else {*()}  # `resume` plans other chunks
    now = before.now()
    assert now.keys() == before.files.keys()
    assert {each for each in now if now[each] != before.files[each]} <= timed


def test_rows_that_become_others_do_not_make_models_useless(run: Run) -> None:
    """As if a picture of the source had been changed since."""
    rows = run.require(ROWS)
    run.store.delete_one(f"{ROWS}/_MANIFEST.json")
    run.commit_records(ROWS, dict(rows.files), RowsInfo.of(rows), content="0" * 64)
    with pytest.raises(DriftError, match="input rows"):
        run.finished(PARTITION)
    assert drop_if_different(run, ROWS) and not drop_if_different(run, ROWS)
    assert run.finished(PARTITION) and run.finished(EXPERT)


def test_status_sees_what_sizes_show_of_the_parts_of_a_partition(run: Run) -> None:
    for artifact, pattern in ((shard(1), "train-*"), (CENTROIDS, "centroids-*")):
        path = file_of(run, artifact, pattern)
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        [status] = [each for each in survey(run) if each.state == "damaged"]
        place = path.relative_to(Path(run.url) / PARTITION)
        assert status.artifact == PARTITION and str(status.error).startswith(f"{place}: gone or cut short; mend")
        path.write_bytes(data)
    assert all(each.state in ("finished", "waiting") for each in survey(run))


def test_in_a_bucket(finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished.url, tmp_path / "run")
    flip_bit(file_of(Run.open(str(tmp_path / "run")), shard(0), "train-*"))
    file_of(Run.open(str(tmp_path / "run")), EXPERT, f"{WEIGHTS}/ema.*").unlink()
    with s3_server(tmp_path / "log"):
        run = Run.open(upload(tmp_path / "run", "damaged"))
        assert run.url == f"s3://{BUCKET}/damaged"
        assert damaged_files(run, deep=True) == [(shard(0), "train-00000.parquet"), (EXPERT, PUBLISHED[0])]
        with pytest.raises(CorruptArtifact, match=r"experts/000/.*/ema.safetensors: gone or cut short; mend"):
            require_sound(run, [STUDENT])
        code, words = doctor(run, "--mend")
        assert code == 0, words
        assert damaged_files(run, deep=True) == [(shard(0), "train-00000.parquet")]
        run.store.delete_one(f"{shard(0)}/train-00000.parquet")
        assert [each.artifact for each in survey(run) if each.state == "damaged"] == [PARTITION]


@pytest.mark.parametrize("command", ["train RUN expert 0", "train RUN all", "plan RUN", "launch RUN --islands FILE"])
def test_who_would_train_on_a_lost_shard_refuses_in_one_line(run: Run, command: str, tmp_path: Path) -> None:
    islands = tmp_path / "islands.yaml"
    islands.write_text("islands: {a: {jobs: 'http://127.0.0.1:1', workers: 1}}\n")
    run.store.delete(EXPERT)
    lost = file_of(run, shard(0), "train-*")
    lost.unlink()
    before = Folder(Path(run.url))
    given = [{"RUN": run.url, "FILE": str(islands)}.get(word, word) for word in command.split()]
    ended = CliRunner().invoke(main, given)
    assert ended.exit_code == 1
    [line] = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert line == f"error: {lost}: gone or cut short; mend it with: ddm doctor {run.url} --deep --mend"
    assert before.now() == before.files


def test_charts_that_nothing_can_make_again_are_left_out(run: Run) -> None:
    run.store.delete(f"{EXPERT}/attempts/0001/state")  # as `ddm tidy --delete` does
    (Path(run.url) / EXPERT / PUBLISHED[2]).unlink()
    before = Folder(Path(run.url))
    code, words = doctor(run, "--mend")
    assert code == 0 and "sound but for " in words and "only charts of its training need it" in words
    assert "delete" not in words and "wrong" not in words
    assert before.now() == before.files
    require_sound(run, [STUDENT])
    load_trained(run, EXPERT)


def test_ctrl_c_in_a_command_that_mends_ends_the_mending(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ddm_ray.data.partition.stage.partition", stopped)
    file_of(run, shard(0), "train-*").unlink()
    code, words = doctor(run, "--mend")
    assert code == 130 and words.splitlines()[-1].startswith("stopped; what is saved stays: ")


def test_without_a_sound_state_the_advice_says_what_it_costs(run: Run) -> None:
    flip_bit(Path(run.url) / EXPERT / PUBLISHED[0])
    flip_bit(Path(run.url) / EXPERT / STATE / "rank-000/ema-0000.safetensors")
    before = Folder(Path(run.url))
    code, words = doctor(run, "--deep", "--mend")
    assert code == 1 and f"{STATE}/rank-000/ema-0000.safetensors: gone or altered" in words
    assert "no state of its last step is sound" in words and "the same bytes" not in words
    assert before.files.keys() - before.now().keys() == {f"{EXPERT}/_MANIFEST.json"}

    shutil.rmtree(Path(run.url) / EXPERT / STATE)
    before.restore()
    shutil.rmtree(Path(run.url) / EXPERT / STATE)
    code, words = doctor(run, "--deep")
    assert code == 1
    assert f"--mend deletes its manifest, then `ddm train {run.url} expert 0` starts from step 0 of 12" in words


def test_what_a_living_training_needs_is_left_alone(run: Run) -> None:
    run.store.delete(EXPERT)
    attempt, ended = claim(run.store, EXPERT), Event()

    def beat() -> None:
        number = 0
        while not ended.wait(0.05):
            number += 1
            attempt.beat({"beat": number, "beat_seconds": 0.05, "phase": "training", "step": 3, "steps": 12})

    heart = Thread(target=beat)
    heart.start()
    try:
        path = file_of(run, shard(0), "train-*")
        path.unlink()
        code, words = doctor(run, "--mend")
    finally:
        ended.set()
        heart.join()
    assert code == 1 and f"{shard(0)}: left alone, since {EXPERT} is trained now" in words
    assert (path.parent / "_MANIFEST.json").exists()


@pytest.mark.parametrize("pattern", ["_MANIFEST.json", "_statistics/*.json", "_statistics/*.safetensors", "features/*"])
def test_a_damaged_reference_is_deleted_for_the_next_evaluation(run: Run, pattern: str) -> None:
    path = min((Path(run.url) / "references").glob(f"*/{pattern}"))
    flip_bit(path)
    code, words = doctor(run, "--deep")
    assert code == 1 and "--mend deletes its records, and the next evaluation makes it again" in words
    code, words = doctor(run, "--deep", "--mend")
    assert code == 0 and "the next evaluation makes it again" in words, words
    assert doctor(run, "--deep")[0] == 0
    run.store.delete("eval")
    evaluate(run, "demo")
    assert path.exists()


def test_a_state_that_is_damaged_is_named_and_costs_nothing(run: Run) -> None:
    flip_bit(Path(run.url) / ROUTER / STATE / "rank-000/value-0000.safetensors")
    assert damaged_files(run, deep=False) == []
    code, words = doctor(run, "--deep")
    damage = f"{STATE}/rank-000/value-0000.safetensors: gone or altered; just a derived run needs it"
    assert code == 1 and f"{damage}; delete {run.url}/{ROUTER}/{STATE}\n" in words
    assert "--mend" not in words
    manifest = run.finished(ROUTER)
    assert manifest and not [*damages(run, manifest, deep=True)]
