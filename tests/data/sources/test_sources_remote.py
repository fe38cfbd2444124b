import io
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from ddm_ray.config import DataConfig
from ddm_ray.data.images import png
from ddm_ray.data.sources import Encoded, open_source
from ddm_ray.data.sources.folder import GONE
from ddm_ray.errors import DataError, DDMError, StorageError
from tests.conftest import ROOT
from tests.data.hub import hub_server
from tests.data.s3 import BUCKET, s3, s3_server, upload
from tests.data.sources.test_sources import COLOURS, everything, write_folder, write_parquet, write_tar

pytestmark = pytest.mark.contract

CONFIG = DataConfig(class_names=COLOURS)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as url:
        yield url


@pytest.mark.parametrize("kind", ["folder", "webdataset", "parquet"])
def test_reading_from_s3_is_reading_from_disk(server, tmp_path, kind):
    {"folder": write_folder, "webdataset": write_tar, "parquet": write_parquet}[kind](tmp_path / "my data", 50)
    uri = upload(tmp_path / "my data", f"{kind} of/pictures")
    local = everything(open_source(CONFIG, str(tmp_path / "my data"), chunk_rows=16))
    remote = pickle.loads(pickle.dumps(open_source(CONFIG, uri, chunk_rows=16)))
    assert everything(remote) == local
    assert len(local) == 50
    assert everything(open_source(CONFIG, uri + "/", chunk_rows=7)) == local


def test_patterns_and_single_files_on_s3(server, tmp_path):
    for number in range(3):
        write_tar(tmp_path / "tars", 5, f"train-00{number}.tar")
    uri = upload(tmp_path / "tars", "patterns")
    rows = everything(open_source(CONFIG, f"{uri}/train-{{000..001}}.tar"))
    assert [row.id.partition("/")[0] for row in rows] == ["train-000.tar"] * 5 + ["train-001.tar"] * 5
    source = open_source(CONFIG, f"{uri}/train-002.tar")
    (unit,) = source.list().units
    # On another machine nothing has been listed before.
    (chunk,) = open_source(CONFIG, f"{uri}/train-002.tar").read(unit)
    assert [row.id for row in chunk.rows] == [f"train-002.tar/{index:03d}" for index in range(5)]
    with pytest.raises(DataError, match=r"train-003.tar is missing"):
        open_source(CONFIG, f"{uri}/train-{{000..003}}.tar").list()


def test_a_picture_that_is_gone_from_s3_is_a_row_with_a_problem(server, tmp_path):
    write_folder(tmp_path, 20)
    uri = upload(tmp_path, "gone")
    source = open_source(CONFIG, uri)
    (unit,) = source.list().units
    s3().delete_file(f"{BUCKET}/gone/{unit.files[3]}")
    (chunk,) = source.read(unit)
    problems = {row.id: row.problem for row in chunk.rows if row.problem}
    assert problems == {unit.files[3]: GONE}
    assert chunk.rows[3] == Encoded(unit.files[3], None, None, GONE)


def test_a_tar_that_changed_on_s3_is_refused(server, tmp_path):
    write_tar(tmp_path, 5)
    uri = upload(tmp_path, "changed")
    source = open_source(CONFIG, uri)
    (unit,) = source.list().units
    write_tar(tmp_path, 50)
    upload(tmp_path, "changed")
    with pytest.raises(DataError, match=r"changed since it was listed, from .* delete RUN/rows to begin again"):
        list(open_source(CONFIG, uri).read(unit))
    s3().delete_file(f"{BUCKET}/changed/{unit.key}")
    with pytest.raises(DataError, match="gone since it was listed"):
        list(open_source(CONFIG, uri).read(unit))


@pytest.mark.parametrize("name", ["s3://no-such-bucket/x", f"s3://{BUCKET}/no-such-prefix"])
def test_nothing_there(server, name):
    with pytest.raises(DataError, match="nothing there, or it needs credentials") as error:
        open_source(CONFIG, name).list()
    assert name in str(error.value)


def test_storage_that_does_not_answer_is_told_in_a_line():
    script = (
        "import sys; from ddm_ray.config import DataConfig; from ddm_ray.data.sources import open_source\n"
        "from ddm_ray.errors import DDMError\n"
        "try: open_source(DataConfig(num_classes=2), sys.argv[1]).list()\n"
        "except DDMError as error: print(type(error).__name__, error)\n"
    )
    environment = {
        "PATH": "",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    for uri in ("s3://bucket/prefix", "hf://datasets/owner/name"):
        command = [sys.executable, "-c", script, uri]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.startswith(f"StorageError {uri}: "), done.stdout
        assert done.stdout.count("\n") == 1


def hub_parquet(count: int, first: int = 0) -> bytes:
    generator = np.random.default_rng(first)
    images = [{"bytes": png(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)), "path": None} for _ in range(count)]
    buffer = io.BytesIO()
    labels = [(first + index) % 3 for index in range(count)]
    pq.write_table(pa.table({"image": images, "label": labels}), buffer, row_group_size=8)
    return buffer.getvalue()


FILES = {
    "README.md": b"# Pictures\n",
    ".gitattributes": b"*.parquet filter=lfs\n",
    "data/train-00000-of-00002.parquet": hub_parquet(20),
    "data/train-00001-of-00002.parquet": hub_parquet(10, 20),
    "data/test-00000-of-00001.parquet": hub_parquet(5, 30),
}


@pytest.mark.parametrize(
    ("path", "split", "count"),
    [
        ("", "all", 35),
        ("", "train", 30),
        ("/data", "test", 5),
        ("/data/train-*.parquet", None, 30),
        ("@main/data/train-00001-of-00002.parquet", None, 10),
        ("@main/data/test-*", None, 5),
    ],
)
def test_parquet_on_the_hub(monkeypatch, path, split, count):
    with hub_server({"ours/pictures": FILES}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        config = CONFIG.model_copy(update={"split": split})
        source = pickle.loads(pickle.dumps(open_source(config, f"hf://datasets/ours/pictures{path}", chunk_rows=8)))
        rows = everything(source)
    assert len({row.id for row in rows}) == len(rows) == count
    assert all(row.problem is None for row in rows)
    images = {row["bytes"] for name, content in FILES.items() if name.endswith("parquet") for row in images_of(content)}
    assert {row.image for row in rows} <= images


def images_of(content: bytes) -> list[dict[str, bytes]]:
    return pq.read_table(pa.BufferReader(content))["image"].to_pylist()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("hf://datasets/ours/nothing", DataError, "nothing there, or it needs credentials"),
        ("hf://datasets/ours/pictures@v9", DataError, "nothing there, or it needs credentials"),
        ("hf://datasets/ours/pictures/no/such", DataError, "nothing there, or it needs credentials"),
        ("hf://datasets/ours/pictures/data/*.tar", DataError, "no file there matches"),
        ("hf://datasets/ours", DataError, "names no data set: hf://datasets/OWNER/NAME"),
        ("hf://models/ours/pictures", DataError, "hf:// is no source"),
    ],
)
def test_what_the_hub_has_not(monkeypatch, name, error, message):
    with hub_server({"ours/pictures": FILES}) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(error, match=message) as raised:
            open_source(CONFIG, name).list()
    assert "\n" not in str(raised.value)


def test_a_gated_data_set_is_told_in_a_line(monkeypatch):
    with hub_server({"ours/pictures": FILES}, token="hf_secret") as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(DDMError) as raised:
            open_source(CONFIG, "hf://datasets/ours/pictures").list()
        assert isinstance(raised.value, DataError | StorageError)
        assert "\n" not in str(raised.value)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        with pytest.raises(DataError, match=r"of splits: 1 of test, 2 of train; .* begin a run with data\.split"):
            open_source(CONFIG, "hf://datasets/ours/pictures").list()


def test_a_file_system_is_not_carried_along(server, tmp_path):
    source = open_source(CONFIG, f"s3://{BUCKET}/x")
    assert len(pickle.dumps(source)) < 2000
    assert isinstance(source.files.filesystem, fs.S3FileSystem)
