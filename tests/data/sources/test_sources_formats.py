import io
import subprocess
import tarfile
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddm_ray.config import DataConfig
from ddm_ray.data.sources import Encoded, open_source
from ddm_ray.data.sources.webdataset import TWICE
from ddm_ray.errors import DataError
from tests.data.sources.test_sources import (
    CAPTIONED,
    COLOURS,
    CONFIG,
    everything,
    picture,
    tar_of,
    write_parquet,
    write_tar,
)

IMAGE = picture(0)
COUNTED = DataConfig(num_classes=3)


def tar_rows(tmp_path, *members: tuple[str, bytes], config: DataConfig = CONFIG) -> list[Encoded]:
    tar_of(tmp_path / "x.tar", *members)
    return everything(open_source(config, str(tmp_path)))


@pytest.mark.parametrize(
    ("members", "config", "condition"),
    [
        ((("a.png", IMAGE), ("a.cls", b"2\n")), CONFIG, 2),
        ((("a.cls", b"green"), ("a.JPG", IMAGE)), CONFIG, 1),
        ((("a.png", IMAGE), ("a.json", b'{"label": 1}')), CONFIG, 1),
        ((("a.png", IMAGE), ("a.json", b'{"class": "blue"}')), CONFIG, 2),
        ((("a.png", IMAGE), ("a.json", b'{"kind": 1, "label": 2}')), {"condition_column": "kind"}, 1),
        ((("a.png", IMAGE), ("a.cls", b"0"), ("a.kind", b"1")), {"condition_column": "kind"}, 1),
        ((("a.png", IMAGE), ("a.seg.png", b"x"), ("a.cls", b"1")), CONFIG, 1),
        ((("a.jpg", IMAGE), ("a.depth.png", b"x"), ("a.png", b"y"), ("a.cls", b"1")), {"image_column": "jpg"}, 1),
        ((("a.png", IMAGE),), {"class_names": ("all",)}, 0),
        ((("a.png", IMAGE), ("a.txt", b" a hen \n")), CAPTIONED, "a hen"),
        ((("a.png", IMAGE), ("a.json", b'{"prompt": "a hen"}')), CAPTIONED, "a hen"),
        ((("a.png", IMAGE), ("a.json", b'{"labels": 2}')), CONFIG, 2),
        ((("a.png", IMAGE), ("a.json", b'{"text": "alt", "caption": "a hen"}')), CAPTIONED, "a hen"),
        ((("a.png", IMAGE), ("a.json", b'{"class": "dog", "labels": 0, "cls": 1}')), CONFIG, 1),
        ((("a.png", IMAGE), ("a.cls", b"1.0")), CONFIG, 1),
        ((("a.png", IMAGE), ("a.cls", b"2.0")), {"class_names": ("1.0", "2.0", "3.0")}, 1),
        ((("a.png", IMAGE), ("a.json", '{"caption": "ein Huhn, schön"}'.encode())), CAPTIONED, "ein Huhn, schön"),
        ((("./deep/down/a.png", IMAGE), ("./deep/down/a.cls", b"0")), CONFIG, 0),
        ((("a.png", IMAGE), ("a.cls", b"0"), (".a.cls", b"9"), ("__info__.json", b"{}")), CONFIG, 0),
    ],
)
def test_samples_of_a_tar(tmp_path, members, config, condition):
    if isinstance(config, dict):
        config = DataConfig(**({"class_names": COLOURS} | config))
    (row,) = tar_rows(tmp_path, *members, config=config)
    where = "deep/down/" if "deep" in members[0][0] else ""
    assert row == Encoded(f"x.tar/{where}a", IMAGE, condition)


@pytest.mark.parametrize(
    ("members", "config", "problem"),
    [
        ((("a.cls", b"1"),), CONFIG, "no image among cls"),
        ((("a.png", IMAGE),), CONFIG, "no label"),
        ((("a.png", IMAGE), ("a.cls", b"3")), CONFIG, "label 3 is not in 0..2"),
        ((("a.png", IMAGE), ("a.cls", b"-1")), CONFIG, "label -1 is not in 0..2"),
        ((("a.png", IMAGE), ("a.cls", b"hen")), CONFIG, "'hen' is none of the 3 classes"),
        ((("a.png", IMAGE), ("a.json", b'{"label": "--1"}')), COUNTED, "'--1' is none of the 3 classes; name them: "),
        ((("a.png", IMAGE), ("a.cls", b"--1")), COUNTED, "'--1' is none of the 3 classes; name them: "),
        ((("a.png", IMAGE), ("a.cls", b"9" * 5000)), CONFIG, "'9999"),
        ((("a.png", IMAGE), ("a.cls", "1".encode("utf-16-le"))), CONFIG, "'1\\x00' has NUL characters, as UTF-16"),
        ((("a.png", IMAGE), ("a.txt", "hen".encode("utf-16-be"))), CAPTIONED, "'\\x00h\\x00e\\x00n' has NUL"),
        (
            (("a.png", IMAGE), ("a.json", b'{"note": "hen", "n": 1}')),
            CAPTIONED,
            "no caption among 'note', 'n' of its json",
        ),
        ((("a.png", IMAGE), ("a.json", b'{"kind": 1}')), CONFIG, "no label among 'kind' of its json; data.condition_"),
        ((("a.png", IMAGE), ("a.cls", b"3.0")), COUNTED, "label 3 is not in 0..2"),
        ((("a.png", IMAGE), ("a.cls", b"\xff\xfe")), CONFIG, "its cls is not UTF-8"),
        ((("a.png", IMAGE), ("a.json", b"{")), CONFIG, "its json can't be read: JSONDecodeError"),
        ((("a.png", IMAGE), ("a.json", b"[" * 100_000)), CONFIG, "its json can't be read: RecursionError"),
        ((("a.png", IMAGE), ("a.json", b"[1]")), CONFIG, "its json has no fields"),
        ((("a.png", IMAGE), ("a.json", b'{"label": [1]}')), CONFIG, "label [1] is neither a number nor a class's"),
        ((("a.png", IMAGE), ("a.txt", b" \n")), CAPTIONED, "no caption"),
        ((("a.png", IMAGE), ("a.json", b'{"text": 5}')), CAPTIONED, "caption is not a text"),
        ((("README", b"hello"),), CONFIG, "no image among"),
    ],
)
def test_samples_that_cannot_be_used_say_why(tmp_path, members, config, problem):
    (row,) = tar_rows(tmp_path, *members, config=config)
    assert row.problem is not None and row.problem.startswith(problem)
    assert (row.image, row.condition) == (None, None)


def test_a_key_that_comes_twice(tmp_path):
    one = (("a.png", IMAGE), ("a.cls", b"1"))
    rows = tar_rows(tmp_path, *one, ("b.png", picture(1)), ("b.cls", b"2"), *one, *one)
    assert rows[:2] == [Encoded("x.tar/a", IMAGE, 1), Encoded("x.tar/b", picture(1), 2)]
    assert [row.problem for row in rows[2:]] == [TWICE] * 2
    assert len({row.id for row in rows}) == 4


@pytest.mark.contract
def test_the_command_that_is_named_packs_a_tar_that_can_be_read(tmp_path):
    folder, names = tmp_path / "FOLDER", ["b", "a-1", "a", "A", "é"]
    folder.mkdir()
    for name in names:
        (folder / f"{name}.png").write_bytes(IMAGE)
        (folder / f"{name}.cls").write_text("1")
    subprocess.run(TWICE.split("`")[1], shell=True, check=True, cwd=tmp_path)
    rows = everything(open_source(CONFIG, str(tmp_path / "NEW.tar")))
    assert sorted(row.id for row in rows if row.condition == 1) == sorted(f"NEW.tar/FOLDER/{name}" for name in names)


@pytest.mark.parametrize(
    ("members", "config", "condition"),
    [
        ((("a.png", IMAGE), ("a.cls", b"\xef\xbb\xbf2\r\n")), CONFIG, 2),
        ((("a.png", IMAGE), ("a.cls", "\ufeffblue\n".encode())), CONFIG, 2),
        ((("a.png", IMAGE), ("a.json", '\ufeff{"label": "\ufeffblue"}'.encode())), CONFIG, 2),
        ((("a.png", IMAGE), ("a.json", b'{"label": 2.0}')), CONFIG, 2),
        ((("a.png", IMAGE), ("a.txt", "\ufeffa hen\r\n".encode())), CAPTIONED, "a hen"),
    ],
)
def test_text_that_others_wrote_is_plain(tmp_path, members, config, condition):
    assert tar_rows(tmp_path, *members, config=config) == [Encoded("x.tar/a", IMAGE, condition)]


def test_long_and_odd_names(tmp_path):
    long = "folder/" * 40 + "n" * 120
    odd = b"caf\xe9".decode("utf-8", "surrogateescape")
    names = [long, "größe", odd]
    members = [(f"{name}.{ending}", content) for name in names for ending, content in (("png", IMAGE), ("cls", b"1"))]
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    rows = everything(open_source(CONFIG, str(tmp_path)))
    assert [row.id for row in rows] == [f"x.tar/{long}", "x.tar/größe", "x.tar/caf\\xe9"]
    assert all(row.condition == 1 for row in rows)


def test_a_tar_that_ends_early_says_so(tmp_path):
    intact = write_tar(tmp_path, 20).read_bytes()
    complete = everything(open_source(CONFIG, str(tmp_path)))
    generator = np.random.default_rng(0)
    end = len(intact.rstrip(b"\0"))
    cuts = [0, 1, 511, 512, 513, 1024, *(1536 * np.arange(3, 12)), *generator.integers(0, end, 100)]
    for cut in cuts:
        (tmp_path / "train-000.tar").write_bytes(intact[:cut])
        *rows, last = everything(open_source(CONFIG, str(tmp_path), chunk_rows=7))
        assert last.id == "train-000.tar/….end"
        assert last.problem is not None and "tar ends early or is damaged" in last.problem
        usable = [row for row in rows if row.problem is None]
        assert usable == complete[: len(usable)]
        assert len(rows) - len(usable) <= 1  # the sample that it ends in
        assert len(usable) >= cut // 2048 - 1
    (tmp_path / "train-000.tar").write_bytes(intact)
    assert everything(open_source(CONFIG, str(tmp_path))) == complete


@pytest.mark.parametrize(
    ("damage", "usable"),
    [
        (lambda content: b"garbage, no tar at all" * 1000, 0),
        (lambda content: content[: 512 * 20] + bytes(512) + content[512 * 21 :], 5),
        (lambda content: content[: 512 * 20] + b"x" * 512 + content[512 * 21 :], 5),
    ],
    ids=["garbage", "a header of zeros", "a garbage header"],
)
def test_what_is_lost_in_a_damaged_tar_is_not_lost_silently(tmp_path, damage, usable):
    path = write_tar(tmp_path, 20)
    path.write_bytes(damage(path.read_bytes()))
    *rows, last = everything(open_source(CONFIG, str(tmp_path)))
    assert last.problem is not None and "damaged" in last.problem
    assert sum(row.problem is None for row in rows) == usable


def parquet_of(tmp_path, config: DataConfig = CONFIG, **columns: object) -> list[Encoded]:
    table = pa.table(columns).rename_columns([name.removesuffix(" again") for name in columns])
    pq.write_table(table, tmp_path / "x.parquet")
    return everything(open_source(config, str(tmp_path)))


LABELLED = {"label": [1]}


@pytest.mark.parametrize(
    ("columns", "config", "condition"),
    [
        ({"image": [{"bytes": IMAGE, "path": "a.png"}], **LABELLED}, {}, 1),
        ({"image": [IMAGE], "label": ["blue"]}, {}, 2),
        ({"img": [{"bytes": IMAGE, "path": None}], "fine_label": [0], "coarse_label": [2]}, {}, 0),
        ({"picture": [IMAGE], "cls": pa.array(["green"]).dictionary_encode()}, {}, 1),
        ({"picture": [IMAGE], "image": [b"x"], **LABELLED}, {"image_column": "picture"}, 1),
        ({"image": [IMAGE], "label": [0], "kind": [2]}, {"condition_column": "kind"}, 2),
        ({"image": [IMAGE]}, {"class_names": ("all",)}, 0),
        ({"image": [IMAGE], "label": [True]}, {}, 1),
        ({"image": pa.array([IMAGE], pa.large_binary()), "label": pa.array([1], pa.uint8())}, {}, 1),
        ({"image": [IMAGE], "text": ["a hen"], "url": ["http://x"]}, CAPTIONED, "a hen"),
        ({"jpg": [IMAGE], "caption": pa.array([" a hen"], pa.large_string())}, CAPTIONED, "a hen"),
    ],
)
def test_columns_of_parquet(tmp_path, columns, config, condition):
    if isinstance(config, dict):
        config = DataConfig(**({"class_names": COLOURS} | config))
    (row,) = parquet_of(tmp_path, config, **columns)
    assert row == Encoded("x.parquet/00000000", IMAGE, condition)


@pytest.mark.parametrize(
    ("columns", "config", "message"),
    [
        (
            {"label": [1]},
            {},
            "which column has the encoded images? there are label; begin a run with data.image_column=NAME",
        ),
        ({"a": [IMAGE], "b": [IMAGE], "label": [1]}, {}, "which column has the encoded images?"),
        (
            {"image": [IMAGE], "count": [1]},
            {},
            "which column has the labels? there are image, count; begin a run with data.condition_column=NAME",
        ),
        (
            {"image": [IMAGE], "label": [[1]]},
            {},
            "'label' is list<element: int64>, no column of labels; cast it to int64",
        ),
        (
            {"image": [[1]], "label": [1]},
            {},
            "'image' is list<element: int64>, no column of encoded images; store the bytes of image files in it, as b",
        ),
        ({"image": ["a.png"], **LABELLED}, {}, "'image' is string, no column of encoded images; store the bytes of"),
        ({"image": [IMAGE], "label": [1], "label again": [2]}, {}, "several columns are called 'label'; rename all"),
        ({"image": [IMAGE], **LABELLED}, {"image_column": "photo"}, "data.image_column 'photo' is not there, no col"),
        ({"image": [IMAGE], **LABELLED}, {"image_column": "label"}, "'label' is int64, no column of encoded images"),
        ({"image": [IMAGE], **LABELLED}, CAPTIONED, "which column has the texts?"),
    ],
)
def test_columns_that_are_not_there(tmp_path, columns, config, message):
    if isinstance(config, dict):
        config = DataConfig(**({"class_names": COLOURS} | config))
    with pytest.raises(DataError) as error:
        parquet_of(tmp_path, config, **columns)
    assert f"{tmp_path}/x.parquet: {message}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("float64", [2.0, 1.0, None]),
        ("float32", [2.0, 1.0, float("nan")]),
        ("int8", [2, 1, None]),
        ("uint64", [2, 1, None]),
        ("decimal128(5, 1)", [Decimal("2.0"), Decimal("1.0"), None]),
        ("string", ["blue", "\ufeffgreen ", ""]),
        ("string", ["2.0", "+1.", ""]),
        ("large_string", ["blue", "green", None]),
        ("string_view", ["blue", "green", None]),
    ],
)
def test_labels_of_types_that_other_tools_write(tmp_path, kind, labels):
    of = {"decimal128(5, 1)": pa.decimal128(5, 1), "string_view": pa.string_view()}
    made = pa.array(labels, of[kind] if kind in of else pa.type_for_alias(kind))
    config = COUNTED if "2.0" in labels else CONFIG
    rows = parquet_of(tmp_path, config, image=[IMAGE] * 3, label=made)
    assert [row.condition for row in rows] == [2, 1, None] and rows[2].problem == "no label"
    if kind in ("int8", "string"):
        rows = parquet_of(tmp_path, config, image=[IMAGE] * 3, label=made.dictionary_encode())
        assert [row.condition for row in rows] == [2, 1, None]


def test_a_label_that_is_no_whole_number_is_refused(tmp_path):
    rows = parquet_of(tmp_path, image=[IMAGE] * 3, label=[1.0, 0.5, float("inf")])
    assert [row.problem for row in rows] == [
        None,
        "label 0.5 is neither a number nor a class's name",
        "label inf is neither a number nor a class's name",
    ]


def test_rows_of_parquet_that_cannot_be_used_say_why(tmp_path):
    images = [None, {"bytes": None, "path": "a.png"}, {"bytes": b"", "path": None}, {"bytes": IMAGE}, {"bytes": IMAGE}]
    rows = parquet_of(tmp_path, image=images, label=[0, 0, 1, 7, None])
    null = "no image: its bytes are null, and paths aren't read"
    assert [row.problem for row in rows] == [null, null, None, "label 7 is not in 0..2", "no label"]
    assert rows[2].image == b""  # the decoder says what is wrong with it
    texts = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    )
    (row,) = parquet_of(tmp_path, CAPTIONED, image=[IMAGE], text=texts)
    assert row.problem == "its text is not UTF-8"


def test_a_file_without_rows_is_one_empty_chunk(tmp_path):
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    pq.write_table(schema.empty_table(), tmp_path / "x.parquet")
    source = open_source(CONFIG, str(tmp_path))
    (chunk,) = source.read(source.list().units[0])
    assert (chunk.number, chunk.rows, chunk.until) == (0, [], 1.0)
    tar_of(tmp_path / "tars" / "x.tar")
    assert everything(open_source(CONFIG, str(tmp_path / "tars"))) == []


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path):
    path = write_parquet(tmp_path, 45)
    content = bytearray(path.read_bytes())
    middle = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content[middle : middle + 40] = b"\xff" * 40
    path.write_bytes(content)
    source = open_source(CONFIG, str(tmp_path), chunk_rows=10)
    (unit,) = source.list().units
    chunks = source.read(unit)
    assert next(chunks).number == 0
    with pytest.raises(DataError, match=r"part-0.parquet, row group 2: can't be read \(.*\); fetch it again") as error:
        next(chunks)
    assert "\n" not in str(error.value)
