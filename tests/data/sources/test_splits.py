"""A data set that others have split: which part is meant is asked, and test images aren't trained on by mistake."""

import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.config import DataConfig
from ddm_ray.data.sources import open_source
from ddm_ray.data.sources.splits import split_of
from ddm_ray.errors import DataError
from tests.data.sources.test_sources import everything, picture

SPLITS = {"train": 4, "val": 2, "test": 1}


def folders(root: Path, splits: dict[str, int] = SPLITS, classes: tuple[str, ...] = ("cat", "dog")) -> str:
    for split, count in splits.items():
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                (root / split / name / f"test-{number}.png").write_bytes(picture(number))
    return str(root)


def folders_below(root: Path) -> str:
    """As COCO's, one level further down."""
    folders(root / "images", {f"{split}2017": count for split, count in SPLITS.items()})
    return str(root)


def folders_of_words(root: Path) -> str:
    return folders(root, {f"{split}Images": count for split, count in SPLITS.items()})


def parquet(root: Path) -> str:
    (root / "data").mkdir()
    for split, count in SPLITS.items():
        table = pa.table({"image": [picture(number) for number in range(count)], "label": [0] * count})
        pq.write_table(table, root / f"data/{split}-00000-of-00001.parquet")
    return str(root)


def tars(root: Path) -> str:
    for split, count in SPLITS.items():
        with tarfile.open(root / f"set_{split}_0.tar", "w") as tar:
            for number in range(count):
                for ending, data in (("png", picture(number)), ("cls", b"0")):
                    (root / "member").write_bytes(data)
                    tar.add(root / "member", f"{number}.{ending}")
        (root / "member").unlink()
    return str(root)


FOLDERS = {"folders": folders, "folders below": folders_below, "folders of words": folders_of_words}
MAKERS = FOLDERS | {"parquet": parquet, "tars": tars}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("counted", [True, False])
def test_which_split_is_meant_is_asked(tmp_path: Path, kind: str, counted: bool) -> None:
    source = MAKERS[kind](tmp_path)
    classes = {"num_classes": 3} if counted else {"class_names": ("cat", "dog")}
    with pytest.raises(DataError) as asked:
        open_source(DataConfig(source=source, **classes), source).list()
    assert "its files are of splits: " in str(asked.value)
    assert str(asked.value).endswith("; data.split chooses one of them, or all; begin a run with data.split=train")


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("split", ["train", "val", "validation", "test", "all"])
def test_a_split_is_a_source(tmp_path: Path, kind: str, split: str) -> None:
    source = MAKERS[kind](tmp_path)
    config = DataConfig(source=source, split=split, num_classes=2)
    images = sum(SPLITS.values()) if split == "all" else SPLITS[split.removesuffix("idation")]
    opened = open_source(config, source)
    rows, listing = everything(opened), opened.list()
    assert len(rows) == images * (1 + (kind in FOLDERS)) and all(row.problem is None for row in rows)
    if kind in FOLDERS:
        assert listing.classes == ("cat", "dog")
        assert {row.condition for row in rows} == {0, 1}
    assert (sum(listing.ignored.values()) == 0) is (split == "all")
    assert listing.ignored.keys() <= {"of other splits"}


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    source = folders(tmp_path)
    with pytest.raises(DataError, match=r"data\.split 'extra' isn't there; begin a run with data\.split="):
        open_source(DataConfig(source=source, split="extra", num_classes=2), source).list()


@pytest.mark.parametrize(
    ("splits", "config"),
    [
        ({"train": 2, "bus": 1}, {"num_classes": 2}),  # a vehicle
        ({"train": 2, "test": 1}, {"class_names": ("train", "test")}),  # the run's own classes
        ({"train": 2}, {"num_classes": 1}),
        ({"bullet train": 2, "test tube": 1, "plane": 1}, {"num_classes": 3}),
        ({"bullet train": 2, "steam train": 1}, {"num_classes": 2}),
        ({"steam train": 2, "test train": 1}, {"class_names": ("steam train", "test train")}),
        ({"bullet train": 2, "crash test": 1}, {"num_classes": 2}),
        ({"bullet train": 2, "crash test": 1}, {"num_classes": 2, "split": "all"}),
        ({"alice/test": 1, "bob/dev": 2}, {"num_classes": 2}),
        ({"alice/test": 1, "bob/dev": 2}, {"num_classes": 2, "split": "all"}),
        ({"Val Thorens": 2, "test shots": 1, "photos": 1}, {"num_classes": 1}),
    ],
)
def test_classes_may_have_such_names(tmp_path: Path, splits: dict[str, int], config: dict) -> None:
    source = folders(tmp_path, splits)
    opened = open_source(DataConfig(source=source, **config), source)
    rows, expected = everything(opened), tuple(sorted({name.partition("/")[0] for name in splits}))
    assert len(rows) == 2 * sum(splits.values()) and all(row.problem is None for row in rows)
    assert config.get("num_classes", 1) == 1 or opened.list().classes == expected


def test_classes_beside_others_that_look_like_splits_have_to_be_named(tmp_path: Path) -> None:
    names = ("bus", "car", "train", "dev")
    source = folders(tmp_path, dict.fromkeys(names, 2), ("",))
    with pytest.raises(DataError, match=r"of train, unless data\.class_names names classes that are called so; "):
        open_source(DataConfig(source=source, num_classes=4), source).list()
    for config in (DataConfig(source=source, class_names=names), DataConfig(source=source, num_classes=4, split="all")):
        rows = everything(open_source(config, source))
        assert sorted(row.condition for row in rows) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_classes_of_all_splits_lie_directly_in_the_source(tmp_path: Path) -> None:
    """A folder above the splits would be the only class."""
    folders(tmp_path / "imagenet")
    with pytest.raises(DataError, match="4 of validation, all in 'imagenet/'; give that folder as "):
        open_source(DataConfig(source=str(tmp_path), split="all", num_classes=2), str(tmp_path)).list()
    source = str(tmp_path / "imagenet")
    opened = open_source(DataConfig(source=source, split="all", num_classes=2), source)
    assert opened.list().classes == ("cat", "dog")


def test_a_split_may_lie_within_its_class(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        folders(tmp_path / name, {"test": 1, "train": 2}, ("",))
    source = str(tmp_path)
    with pytest.raises(DataError, match="its files are of splits: 2 of test, 4 of train; "):
        open_source(DataConfig(source=source, num_classes=2), source).list()
    opened = open_source(DataConfig(source=source, split="train", num_classes=2), source)
    assert opened.list().classes == ("cat", "dog") and [row.condition for row in everything(opened)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "splits", [{"train": 1, "test": 1, "extra": 1}, {"train_256": 1, "test": 1}, {"train_a": 1, "val_a": 1, "b": 1}]
)
def test_it_is_asked_also_beside_other_folders(tmp_path: Path, splits: dict[str, int]) -> None:
    source = folders(tmp_path, splits)
    for settings in ({"num_classes": 1}, {"num_classes": 9}):
        with pytest.raises(DataError, match="its files are of splits: "):
            open_source(DataConfig(source=source, **settings), source).list()


def test_init_asks_and_shows_the_classes_of_the_split(tmp_path: Path) -> None:
    source = folders(tmp_path / "set")
    words = ["init", str(tmp_path / "run"), "--recipe", "tiny", "--set", f"data.source={source}"]
    words += ["--set", "data.num_classes=2", "--set", "embedder.dim=2"]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 1 and "begin a run with --set data.split=train\n" in refused.output
    done = CliRunner().invoke(main, [*words, "--set", "data.split=train"])
    assert done.exit_code == 0, done.output
    assert "classes: cat 4, dog 4" in done.output and "6 files aren't read: 6 of other splits" in done.output


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("data/train-00000-of-00002.parquet", "train"),
        ("default/test/0000.parquet", "test"),
        ("imagenet_VAL_0.tar", "validation"),
        ("trains.tar", None),
        ("latest-0.tar", None),
        ("shard-000.tar", None),
        ("my test/val/0.tar", "validation"),
    ],
)
def test_names_of_splits(path: str, split: str | None) -> None:
    named = split_of(path, by_folder=False)
    assert (named.split if named else None) == split
