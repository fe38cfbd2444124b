"""More than a thousand files damaged, one at a time: whoever uses one refuses it by name, or nothing is different."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm_ray.core.condition import Text
from ddm_ray.data.loading.loader import Loader, load_rows
from ddm_ray.data.partition.clustering import RowsReader
from ddm_ray.data.partition.stage import partition
from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.jobs.status import survey
from ddm_ray.run.graph import PARTITION, ROWS, shard
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import mixture_info
from tests.data.damage import Damage, Folder, Tally, damages
from tests.data.damaged_runs import make_images, make_texts, resume
from tests.data.test_damage_sources import LEAST as LEAST_OF_SOURCES

pytestmark = pytest.mark.integration

SHARDS = [shard(0), shard(1)]
LEAST = {"finished": 240, "begun": 150, "interrupted": 12}


MAKERS = {"images": make_images, "texts": make_texts}
KINDS = ["images", pytest.param("texts", marks=pytest.mark.chaos)]


@dataclass(frozen=True)
class Made:
    """A run that is finished as far as its partition, and files of the same run as it was made of other images."""

    now: Folder
    before: Folder


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    versions = []
    for version in (0, 1):
        run = MAKERS[request.param](folder, version)
        make_partition(run)
        versions.append(Folder(Path(run.url)))
        if not version:
            shutil.rmtree(run.url)
    before, now = versions
    return Made(now, before)


def damages_of(made: Made, key: str, generator: np.random.Generator, *counts: int) -> Iterator[Damage]:
    """And what the file was in the run's earlier version, if it was another."""
    yield from damages(key, made.now.files, generator, *counts)
    if made.before.files.get(key, made.now.files[key]) != made.now.files[key]:
        yield Damage(key, "an old version", made.before.files[key])


def read_rows(run: Run) -> object:
    return [table.to_pylist() for table in RowsReader(run, ROWS).parts(None, lambda share, note: None)]


def read_shards(run: Run) -> object:
    both = [load_rows(run, SHARDS, split) for split in ("train", "heldout")]
    return [
        (rows.ids, as_bytes(rows.data_NCHW), as_bytes(rows.cluster_N), as_bytes(rows.text or rows.label_N))
        for rows in both
    ]


def stream(run: Run) -> object:
    streamed = []
    for artifact in SHARDS:
        with Loader(run, [artifact], 0, 16, rows_gib=0, window_bytes=4000) as loader:
            steps = range(-(-loader.num_rows // 16))
            batches = [[as_bytes(part) for part in loader.batch(step, torch.arange(16))] for step in steps]
            streamed.append((loader.num_rows, batches, loader.null_text and as_bytes(loader.null_text)))
    return streamed


def make_partition(run: Run) -> object:
    return partition(run, with_report=False)


def prior(run: Run) -> object:
    return repr(mixture_info(run))


def shown_status(run: Run) -> object:
    """As `ddm status` shows it; that something isn't finished, or damaged, is as good as a refusal."""
    statuses = survey(run)
    for status in statuses[:2]:
        if status.state != "finished":
            raise DriftError(f"{status.error or status.state} (no finished {run.url}/{status.artifact})")
    return statuses


def as_bytes(content: torch.Tensor | Text) -> bytes:
    parts = [content.tokens_BLE, content.mask_BL, content.pooled_BP] if isinstance(content, Text) else [content]
    return b"".join(part.numpy().tobytes() for part in parts if part is not None)


READERS: dict[str, Callable[[Run], object]] = {
    "rows": read_rows,
    "shards": read_shards,
    "stream": stream,
    "prior": prior,
    "status": shown_status,
    "prepare": resume,
    "partition": make_partition,
}


STAGES = ("prepare", "partition")

# Who has to refuse a file that isn't what it was, by what its path begins and ends with; of others nobody reads a byte
# once the stage that made them is finished.
MUST_REFUSE: list[tuple[str, str, set[str]]] = [
    ("run.json", "", set(READERS)),
    (f"{ROWS}/{NAME}", "", set(READERS)),
    (f"{ROWS}/part-", ".parquet", {"rows"}),
    (f"{ROWS}/duplicates", "", {"rows"}),
    (f"{PARTITION}/{NAME}", "", set(READERS) - {"rows", "prepare"}),
    (f"{PARTITION}/shards/", NAME, {"shards", "stream"}),
    (f"{PARTITION}/shards/", "null_text.safetensors", {"stream"}),
    (f"{PARTITION}/shards/", "train-00000.parquet", {"shards", "stream"}),
    (f"{PARTITION}/shards/", "heldout-00000.parquet", {"shards"}),
]


def test_damage_to_a_finished_run(made: Made) -> None:
    folder = made.now
    run = Run.open(str(folder.path))
    undamaged = {name: read(run) for name, read in READERS.items()}
    generator, tally = np.random.default_rng(2), Tally()
    for key in folder.files:
        must = next((who for begin, end, who in MUST_REFUSE if key.startswith(begin) and key.endswith(end)), set())
        kinds = list(damages_of(made, key, generator, 3, 1, 2))
        for damage in kinds if must else generator.permutation(np.array(kinds, object))[:4]:
            tally.damages += 1
            with folder.damaged(damage):
                for name, read in READERS.items():
                    about = f"{damage}, {name}"
                    if str(damage) == f"{ROWS}/{NAME}: an old version" and name == "prepare":
                        continue  # it is one of this run's rows; that these are gone is for their readers to say
                    refused = tally.meet(about, partial(anew, read, run), undamaged[name], names(run, key))
                    noticed = refused or name not in must or gone_or_equal(damage, folder)
                    tally.expect(noticed, f"{about}: doesn't notice")
                    if name in STAGES:
                        tally.expect(as_it_was(folder, damage), f"{about}: leaves something else")
    assert tally.refused
    tally.check(LEAST["finished"])


def anew(read: Callable[[Run], object], run: Run) -> object:
    return read(Run.open(run.url))


def names(run: Run, key: str) -> list[str]:
    """A refusal names the file, or the artifact that it is of."""
    artifact = key.partition("/")[0]
    return [f"{run.url}/{artifact}", f"no finished {artifact}", f"has no {key}", f"input {artifact}: "]


def gone_or_equal(damage: Damage, folder: Folder) -> bool:
    """What is gone may be made again; space between the words of JSON is no damage."""
    if damage.data is None:
        return True
    try:
        return bool(json.loads(damage.data) == json.loads(folder.files[damage.key]))
    except ValueError:
        return False


def as_it_was(folder: Folder, damage: Damage) -> bool:
    """Whether all files are as they were, but for the damaged one."""
    now = folder.now()
    now.pop(damage.key, None)
    return now == {key: data for key, data in folder.files.items() if key != damage.key}


@contextmanager
def begun(made: Made, *without: str) -> Iterator[Folder]:
    """The run before these files and folders of it were made."""
    for key in without:
        path = made.now.path / key
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    try:
        yield Folder(made.now.path)
    finally:
        made.now.restore()


def test_damage_to_rows_that_are_begun(made: Made) -> None:
    """All their chunks have a record, but for one of images; whoever reads the rows comes after `prepare`."""
    lost = [key for key in made.now.files if key.endswith("/000000-000000-last.json")]
    run = Run.open(str(made.now.path))

    def go_on() -> object:
        run = Run.open(str(made.now.path))
        return resume(run), read_rows(run)

    with begun(made, PARTITION, f"{ROWS}/{NAME}", f"{ROWS}/duplicates.parquet", *lost) as folder:
        generator, tally = np.random.default_rng(3), Tally()
        started, undamaged = [status.artifact for status in survey(run)], go_on()
        left = {key: data for key, data in made.now.files.items() if not key.startswith(f"{PARTITION}/")}
        assert folder.now() == left
        folder.restore()
        for key in [key for key in folder.files if key.startswith(f"{ROWS}/")]:
            for damage in damages_of(Made(folder, made.before), key, generator, 1, 1, 2):
                tally.damages += 1
                with folder.damaged(damage):
                    asked = f"{damage}, status"
                    tally.meet(asked, lambda: [status.artifact for status in survey(run)], started, names(run, key))
                    tally.meet(damage, go_on, undamaged, names(run, key))
    assert tally.refused
    tally.check(LEAST["begun"])


def test_damage_to_a_partition_that_is_begun(made: Made) -> None:
    """It has centroids and shards; what is used of them is whole, or made again."""
    run = Run.open(str(made.now.path))

    def go_on() -> object:
        run = Run.open(str(made.now.path))
        return make_partition(run), read_shards(run), stream(run)

    with begun(made, f"{PARTITION}/{NAME}", f"{PARTITION}/report") as folder:
        generator, tally = np.random.default_rng(4), Tally()
        undamaged = go_on()
        assert folder.now() == made.now.files
        folder.restore()
        for key in [key for key in folder.files if key.startswith(f"{PARTITION}/")]:
            kinds = list(damages_of(Made(folder, made.before), key, generator, 2, 1, 1))
            for damage in generator.permutation(np.array(kinds, object))[:2]:
                tally.damages += 1
                with folder.damaged(damage):
                    tally.meet(damage, go_on, undamaged, names(run, key))
    assert tally.refused
    tally.check(LEAST["interrupted"])


@pytest.mark.parametrize("where", ["finished", "begun"])
def test_a_shard_of_an_earlier_partition_is_not_used(where: str, made: Made) -> None:
    """Of rows that were prepared anew since, put in the place of today's."""
    run = Run.open(str(made.now.path))
    stale = [Damage(key, "stale", data) for key, data in made.before.files.items() if key.startswith(f"{SHARDS[1]}/")]
    with begun(made, *([f"{PARTITION}/{NAME}"] if where == "begun" else [])) as folder, folder.damaged(*stale):
        for read in (read_shards, stream):
            with pytest.raises(DriftError, match=r"partition/shards/cluster=001 was made otherwise: input rows"):
                read(run)
        make_partition(run)
        assert folder.now() == made.now.files


def test_shards_in_each_others_place_are_refused(made: Made) -> None:
    run = Run.open(str(made.now.path))
    with begun(made, *SHARDS):
        before = {key: data for key, data in made.now.files.items() if key.startswith("partition/shards/")}
        for key, data in before.items():
            path = made.now.path / key.replace("=000/", "=00x/").replace("=001/", "=000/").replace("=00x/", "=001/")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        for read in (read_shards, stream):
            with pytest.raises(CorruptArtifact, match=r"cluster=000/_MANIFEST\.json: is that of .*cluster=001"):
                read(run)
        make_partition(run)
        assert made.now.now() == made.now.files


def test_they_are_more_than_a_thousand() -> None:
    assert sum(LEAST_OF_SOURCES.values()) + len(MAKERS) * sum(LEAST.values()) >= 1000
