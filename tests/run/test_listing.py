"""A list of very many files reads back as it was written, or is refused by name; the manifest stays small."""

import io
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.errors import CorruptArtifact, DataError
from ddm_ray.run import listing
from ddm_ray.run.graph import ROWS
from ddm_ray.run.listing import ListedFiles, list_of, named_or_listed, with_all_files
from ddm_ray.run.manifest import FileRecord, Identity, Manifest, read_manifest, sha256
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import RECORD_BYTES
from ddm_ray.store.store import Store
from tests.run.test_manifest import name, record

MANY = 600_000
hostile = st.sampled_from(["", "..", "../x", "a/../b", "/a", "a//b", "a\x1b[2J", "x" * 256, "y/" * 600 + "y"])


def parts(count: int) -> Iterator[tuple[str, FileRecord]]:
    """Files as 150 million rows have them, and those of a unit above a million, which aren't in the order of names."""
    for number in range(count):
        unit = number // 8 + 10**6 - 100
        yield f"part-{unit:06d}-{number % 8:06d}-{number:08x}.parquet", FileRecord(number, f"{number:064x}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def written(store: Store, files: dict[str, FileRecord]) -> Manifest:
    """The manifest of rows of these files, written and read again."""
    named = named_or_listed(store, ROWS, files.items(), {"null_text.safetensors": FileRecord.of(b"null")})
    manifest = Manifest(ROWS, Identity({}), named, {}, content=sha256(b"rows"))
    store.write(f"{ROWS}/_MANIFEST.json", manifest.to_write("here"))
    return read_manifest(store, ROWS)


@pytest.mark.chaos
def test_files_of_150_million_rows_are_read_as_they_were_written(run: Run) -> None:
    files = dict(parts(MANY))
    manifest = written(run.store, files)
    assert run.store.sizes(ROWS)["_MANIFEST.json"] < 1000 < RECORD_BYTES < 149 * MANY
    every = with_all_files(run, manifest).files
    assert len(every) == MANY + 1
    assert dict(every.items()) == {**files, "null_text.safetensors": FileRecord.of(b"null")}
    assert list(every) == sorted(every)
    assert [every[each] for each in list(files)[:: MANY // 50]] == list(files.values())[:: MANY // 50]
    assert "part-1" not in every and "zzz" not in every


def test_a_list_is_no_object_for_each_file(run: Run) -> None:
    """Of Python's, that is: Arrow has it as it is stored."""
    manifest = written(run.store, dict(parts(5 * listing.MAX_NAMED)))
    tracemalloc.start()
    every = with_all_files(run, manifest).files
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 5 * listing.MAX_NAMED < len(every) * 2


def test_few_files_are_named_as_they_always_were(store: Store) -> None:
    files = dict(parts(listing.MAX_NAMED))
    manifest = written(store, files)
    assert manifest.files == {**files, "null_text.safetensors": FileRecord.of(b"null")}
    assert list_of(manifest) is None
    assert list(store.sizes(ROWS)) == ["_MANIFEST.json"]


@given(files=st.dictionaries(name | hostile, record, min_size=1, max_size=12), most=st.integers(1, 4))
def test_a_list_is_written_just_if_it_can_be_read(
    files: dict[str, FileRecord], most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(str(tmp_path_factory.mktemp("store")))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(listing, "MAX_NAMED", most)
        allowed = not any(_refused(each) for each in files)
        try:
            manifest = written(store, files)
        except DataError:
            assert not allowed
            assert not any(each.endswith("_MANIFEST.json") for each in store.sizes(""))
            return
        assert allowed
        every = manifest.files
        if key := list_of(manifest):
            every = ListedFiles(store.read(f"{ROWS}/{key}"), key)
        assert dict(every.items()) == {**files, "null_text.safetensors": FileRecord.of(b"null")}


def _refused(each: str) -> bool:
    try:
        Manifest.from_json(Manifest("rows", Identity({}), {each: FileRecord.of(b"")}, {}).to_json(), "here")
    except CorruptArtifact:
        return True
    return False


def table(**columns: object) -> bytes:
    fields = {"name": ["a", "b"], "bytes": [1, 2], "sha256": [bytes(32), bytes(32)]} | columns
    buffer = io.BytesIO()
    pq.write_table(pa.table(fields), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PAR1",
        table()[:-20],
        table(name=["b", "a"]),
        table(name=["a", "a"]),
        table(name=["a", None]),
        table(name=["a", "../b"]),
        table(bytes=[1, -1]),
        table(bytes=[1, None]),
        table(bytes=["one", "two"]),
        table(sha256=[b"short", b"short"]),
    ],
)
def test_what_is_no_list_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(CorruptArtifact, match=r"^s3://b/rows/_files/list\.parquet: .*; delete it and run the"):
        ListedFiles(data, "s3://b/rows/_files/list.parquet")


@pytest.mark.parametrize("break_it", [lambda path: path.unlink(), lambda path: path.write_bytes(table())])
def test_a_list_that_is_gone_or_another_is_refused(run: Run, break_it: Callable[[Path], object]) -> None:
    manifest = written(run.store, dict(parts(listing.MAX_NAMED + 1)))
    break_it(Path(run.url) / ROWS / str(list_of(manifest)))
    with pytest.raises(CorruptArtifact, match=r"rows/_files/[0-9a-f]{16}.parquet: .*; mend rows, as an examination"):
        with_all_files(run, manifest)
