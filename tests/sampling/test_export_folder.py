"""An export in the place of another: what no export wrote stays, whatever happens on the way."""

import errno
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddm_ray.core.flow import Flow
from ddm_ray.errors import MissingArtifact, SamplingError, StorageError
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.dense_export import save_dense
from tests.foreign_files import content, plant, require_kept
from tests.sampling.exports import dense
from tests.sampling.tiny_components import classes, texts

pytestmark = pytest.mark.contract

Save = Callable[[Path], None]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Save]:
    """Exports by what they are of, each over what is there."""
    root = tmp_path_factory.mktemp("saves")
    one, many, monolith = classes(), texts(root / "clip"), dense(root / "dense", Flow(), {}, False).components
    return {
        "classes": lambda folder: one.save_pretrained(folder, overwrite=True),
        "texts": lambda folder: many.save_pretrained(folder, overwrite=True),
        "dense": lambda folder: save_dense(monolith, "a card", folder, overwrite=True),
    }


@pytest.fixture(scope="module")
def fresh(saves: dict[str, Save], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes | str]]:
    """The content of each export in a folder of its own."""
    root = tmp_path_factory.mktemp("fresh")
    for name, save in saves.items():
        save(root / name)
    return {name: content(root / name) for name in saves}


@pytest.mark.parametrize(
    ("first", "second"), [("classes", "texts"), ("texts", "classes"), ("texts", "dense"), ("dense", "dense")]
)
def test_only_the_files_of_the_export_before_make_way(
    saves: dict[str, Save], fresh: dict[str, dict[str, bytes | str]], tmp_path: Path, first: str, second: str
) -> None:
    folder = tmp_path / "export"
    saves[first](folder)
    plant(folder)
    (folder / "transformer").mkdir(exist_ok=True)
    (folder / "transformer/notes.txt").write_text("beside weights")
    mine = content(folder).keys() - fresh[first].keys()
    saves[second](folder)
    require_kept(folder)
    assert (folder / "transformer/notes.txt").read_text() == "beside weights"
    left = content(folder)
    assert mine <= left.keys()
    assert fresh[second].items() <= left.items()
    assert left.keys() - fresh[second].keys() - mine <= {"transformer"}, "a folder that notes are in"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def change_card(folder: Path) -> str:
    (folder / "README.md").write_text("a card, and what I know of it")
    return "README.md"


def put_file(folder: Path) -> str:
    (folder / "vae").write_text("a file, and the new export needs a folder")
    return "vae/config.json"


def put_folder(folder: Path) -> str:
    (folder / "null_text.safetensors/mine").mkdir(parents=True)
    return "null_text.safetensors"


def put_link(folder: Path) -> str:
    (folder.parent / "elsewhere").mkdir()
    (folder / "text_encoder").symlink_to(folder.parent / "elsewhere")
    return "text_encoder/config.json"


def lead_away(folder: Path) -> str:
    """A component's folder is moved elsewhere, and a link left in its place."""
    (folder / "expert_000").rename(folder.parent / "elsewhere")
    (folder / "expert_000").symlink_to(folder.parent / "elsewhere")
    return "expert_000/config.json"


@pytest.mark.parametrize(
    ("first", "put", "second"),
    [
        ("dense", change_card, "dense"),
        ("classes", change_card, "dense"),
        ("classes", put_file, "texts"),
        ("classes", put_folder, "texts"),
        ("classes", put_link, "texts"),
        ("texts", lead_away, "classes"),
    ],
)
def test_a_file_in_the_way_is_named_and_nothing_changed(
    saves: dict[str, Save], tmp_path: Path, first: str, put: Callable[[Path], str], second: str
) -> None:
    folder = tmp_path / "export"
    saves[first](folder)
    plant(folder)
    name = put(folder)
    before = content(tmp_path)
    with pytest.raises(SamplingError, match=rf"^{folder}/{name} isn't as an export wrote it: move it away, or use an"):
        saves[second](folder)
    assert content(tmp_path) == before


def test_an_index_that_lists_no_files_is_refused(saves: dict[str, Save], tmp_path: Path) -> None:
    """Dense models were exported without a list before."""
    folder = tmp_path / "export"
    saves["dense"](folder)
    index = json.loads((folder / "model_index.json").read_text())
    del index["_ddm_ray_files"]
    (folder / "model_index.json").write_text(json.dumps(index))
    before = content(tmp_path)
    with pytest.raises(SamplingError, match=r"model_index\.json doesn't list the files of its export: delete "):
        saves["dense"](folder)
    assert content(tmp_path) == before


def interrupted(number: int, how: Callable[[], Any]) -> Callable[[Path, Path], Path]:
    """`Path.rename`, but for its call of this number."""
    rename, calls = Path.rename, [0]

    def renamed(source: Path, target: Path) -> Path:
        calls[0] += 1
        if calls[0] == number:
            how()
        return rename(source, target)

    return renamed


def refuse() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("number", [1, 12])
def test_an_old_pipeline_comes_back_if_the_new_one_cannot_take_its_place(
    saves: dict[str, Save], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder = tmp_path / "export"
    saves["classes"](folder)
    plant(folder)
    before = content(tmp_path)
    monkeypatch.setattr(Path, "rename", interrupted(number, refuse))
    with pytest.raises(StorageError, match="export: can't be saved: No space left on device"):
        saves["texts"](folder)
    monkeypatch.undo()
    assert {name: data for name, data in content(tmp_path).items() if data != "folder"} == {
        name: data for name, data in before.items() if data != "folder"
    }
    DDMPipeline.from_pretrained(folder)


@pytest.mark.parametrize("number", [1, 12])
def test_a_killed_export_is_not_taken_for_whole_and_the_next_one_goes_on(
    saves: dict[str, Save], fresh: dict[str, dict[str, bytes | str]], tmp_path: Path, number: int
) -> None:
    folder = tmp_path / "export"
    saves["dense"](folder)
    plant(folder)

    def killed() -> None:
        Path.rename = interrupted(number, lambda: os._exit(9))  # type: ignore[method-assign]
        saves["texts"](folder)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == 9
    with pytest.raises(MissingArtifact, match="its export was cut off as it replaced another; export it again"):
        DDMPipeline.from_pretrained(folder)
    require_kept(folder)
    saves["texts"](folder)
    require_kept(folder)
    assert fresh["texts"].items() <= content(folder).items()
    assert not (folder / "transformer").exists() and not (folder / "README.md").exists()
    DDMPipeline.from_pretrained(folder)
