"""No code of a checkpoint folder is run, whatever is in it, nor if somebody at a terminal says yes to all questions."""

import json
import os
import pty
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.errors import DDMError
from tests.conftest import ROOT
from tests.models.hostile_folders import HOSTILE, made, write_bases

pytestmark = pytest.mark.chaos

RESULTS = "results.json"


def attempt(root: Path) -> None:
    """Open every one, in this process, and write down what came of each."""
    results = {}
    for number, hostile in enumerate(HOSTILE):
        folder = made(root, hostile, number)
        try:
            hostile.opens(str(folder))
            results[hostile.name] = "opened"
        except DDMError as error:
            results[hostile.name] = str(error)
        except Exception as error:
            results[hostile.name] = f"\n{error!r}"
        if (root / "CANARY").exists():
            (root / "CANARY").unlink()
            results[hostile.name] = "executed"
        if hostile.base == "ours":
            done = CliRunner().invoke(main, ["sample", str(folder), "-o", str(root / "it.png")])
            assert not (root / "CANARY").exists(), hostile.name
            *before, last = done.output.strip().splitlines()
            is_told = done.exit_code == 1 and last.startswith("error: ") and not any("Trace" in line for line in before)
            results[f"ddm sample, {hostile.name}"] = last if is_told else f"\n{done.output}"
    (root / RESULTS).write_text(json.dumps(results))


def test_no_folder_runs_code(tmp_path: Path) -> None:
    write_bases(tmp_path)
    folder = str(tmp_path)
    code = f"import pathlib; from tests.models.test_hostile_folders import attempt; attempt(pathlib.Path({folder!r}))"
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, "HF_HUB_OFFLINE": "1"})
    seen, ended = bytearray(), threading.Event()

    def say_yes() -> None:
        while not ended.wait(0.2):
            os.write(terminal, b"y\n")

    answering = threading.Thread(target=say_yes)
    answering.start()
    try:
        while part := os.read(terminal, 65536):
            seen += part
    except OSError:  # it has ended
        pass
    finally:
        ended.set()
        answering.join()
        _, status = os.waitpid(pid, 0)
    assert status == 0, seen[-3000:].decode()
    assert b"[y/N]" not in seen
    results = json.loads((tmp_path / RESULTS).read_text())
    assert len(HOSTILE) > 50
    wrong = {name: result for name, result in results.items() if "\n" in result or result in ("opened", "executed", "")}
    assert not wrong, json.dumps(wrong, indent=1)
    assert not (tmp_path / "CANARY").exists()


def test_sound_folders_open(tmp_path: Path) -> None:
    """Also those that are of the hub's cache, whose files are links to others of it."""
    write_bases(tmp_path)
    kinds = {hostile.base: hostile.opens for hostile in HOSTILE if hostile.name.startswith(hostile.base)}
    for base, opens in kinds.items():
        snapshot = tmp_path / "models--x" / "snapshots" / base
        for path in (tmp_path / base).rglob("*"):
            if path.is_file():
                blob = tmp_path / "models--x/blobs" / f"{base}-{path.relative_to(tmp_path / base)}".replace("/", "-")
                blob.parent.mkdir(parents=True, exist_ok=True)
                path.rename(blob)
                place = snapshot / path.relative_to(tmp_path / base)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(os.path.relpath(blob, place.parent))
        opens(str(snapshot))


@pytest.mark.parametrize("name", ["vit.pth", "vit.bin"])
def test_a_pickle_of_timms_is_refused_with_the_way_to_convert_it(tmp_path: Path, name: str) -> None:
    write = next(hostile for hostile in HOSTILE if hostile.name == f"timm: {name}")
    (tmp_path / "folder").mkdir()
    write.change(tmp_path / "folder")
    with pytest.raises(DDMError, match=r"^[^\n]*only safetensors are read; [^\n]*save_file\(torch\.load"):
        write.opens(str(tmp_path / "folder"))
