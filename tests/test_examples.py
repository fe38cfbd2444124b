"""The programs of examples/ run with small settings of their own, and do what they say."""

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch.nn.functional import mse_loss

from ddm_ray.cli import main
from ddm_ray.core.flow import interpolate, velocity
from ddm_ray.core.names import STRATEGIES, strategies_of_packages
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sources.registry import SOURCES
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.info import RowsInfo
from ddm_ray.run.run import Run
from tests.conftest import ROOT
from tests.data.sources.contract import check_named
from tests.random_run import make_run

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
SETTINGS = ("evaluate.strategies=[once]", "evaluate.num_samples=64", "sample.steps=4")
Ran = dict[str, Any]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of the recipe tiny: two experts and a router, with random weights."""
    return make_run(str(tmp_path_factory.mktemp("examples") / "tiny"), settings=SETTINGS)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ran]:
    """Run an example in an empty folder with these arguments; returns its global names."""

    def run(name: str, *words: str) -> Ran:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *words])
        with torch.random.fork_rng(devices=[]), patch.dict(STRATEGIES):
            return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package that examples/pyproject.toml describes, installed by pip in a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLES, folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", folder / "site"]
    command = [sys.executable, "-m", "pip", "install", *options, folder / "examples"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    def forget() -> None:
        vars(SOURCES).pop("_others", None)
        strategies_of_packages.cache_clear()
        for module in ("own_source", "own_strategy"):
            sys.modules.pop(module, None)

    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder / "site"))
        invalidate_caches()
        forget()
        yield
    forget()


def commands(name: str) -> list[list[str]]:
    """The `ddm` commands in an example's docstring, without `ddm`."""
    lines = re.findall(r"^    ddm (.+)$", (EXAMPLES / name).read_text(), re.MULTILINE)
    return [line.split("#")[0].split() for line in lines]


def ddm(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_table_and_each_docstring_say_how_to_run_it() -> None:
    table = (EXAMPLES / "README.md").read_text()
    assert PROGRAMS and {*re.findall(r"^\| \[([\w.]+)\]", table, re.MULTILINE)} == {*PROGRAMS, NOTEBOOK.name}
    for name in PROGRAMS:
        assert f"    python examples/{name}" in (EXAMPLES / name).read_text().split('"""')[1]


NOTEBOOK = EXAMPLES / "from_data_to_picture.ipynb"


@pytest.mark.contract
def test_a_mixture_is_trained_on_shards_and_saved(ran: Callable[..., Ran], tmp_path: Path) -> None:
    names = ran("train_digits.py", "--steps", "30")
    assert sum(len(shard) for shard in names["shards"]) == len(names["rows"]) == 1797
    for k, (expert, shard) in enumerate(zip(names["experts"], names["shards"], strict=True)):
        data, label_B, cluster_B = shard[:]
        assert (cluster_B == k).all() and len(data) == int(names["counts_CK"][:, k].sum())
        noise, t_B = torch.randn_like(data), torch.rand(len(data))
        with torch.inference_mode():
            loss = mse_loss(expert(interpolate(data, noise, t_B), t_B, label_B), velocity(data, noise))
        assert loss < 0.8 * velocity(data, noise).square().mean(), "it learnt more than to say nothing"
    with Image.open(tmp_path / "digits.png") as picture:
        assert picture.size[0] > 20 * 48 and picture.size[1] == 8 + 6 * (48 + 3) + 8  # six lines of 20 images
    saved = DDMPipeline.from_pretrained(tmp_path / "digits-mixture")
    assert saved.models.info.num_experts == 4
    again = saved([*"0123456789"], num_images_per_prompt=2, seeds=0, strategy="full", output_type="pt")
    assert torch.equal(again.images, names["output"].images)


@pytest.mark.contract
def test_the_routing_is_plotted_for_each_strategy(ran: Callable[..., Ran], tiny: Run, tmp_path: Path) -> None:
    names = ran("plot_routing.py", tiny.url, "--images", "3", "--steps", "5", "--out", "plot.png")
    assert list(names["outputs"]) == ["full", "top-1", "once"]
    for output in names["outputs"].values():
        assert output.routing_SBK.shape == (5, 3, 2)
        assert torch.allclose(output.routing_SBK.sum(dim=2), torch.ones(5, 3))
    assert (names["outputs"]["once"].routing_SBK[0] == names["outputs"]["once"].routing_SBK[-1]).all()
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.size == (9 * 120, (3 * 3 // 2 + 1.5) * 120)


@pytest.mark.contract
def test_a_strategy_of_the_program_samples(ran: Callable[..., Ran], tiny: Run, tmp_path: Path) -> None:
    strategies = ["full", "commit-1", "commit", "commit-0.5", "top-1"]
    names = ran("own_strategy.py", tiny.url, "--images", "4", "--steps", "5", "--strategies", *strategies)
    outputs = names["outputs"]
    assert torch.allclose(outputs["commit-1"].images, outputs["full"].images, atol=1e-6), "it never commits"
    assert outputs["commit-0.5"].num_expert_rows == outputs["top-1"].num_expert_rows == 4 * 5, "it does at once"
    assert not (outputs["commit-0.5"].experts_SB != outputs["commit-0.5"].experts_SB[0]).any(), "for good"
    with Image.open(tmp_path / "strategies.png") as picture:
        assert picture.size[1] == 8 + len(strategies) * (48 + 3) + 8

    probs_BK = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.95, 0.05], [0.1, 0.95, 0.05]])
    before_BK = torch.tensor([[0.4, 0.3, 0.3], [0.4, 0.3, 0.3], [1.0, 0.0, 0.0]])
    expected_BK = torch.tensor([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert torch.allclose(names["Commit"](0.9).route(probs_BK, before_BK, None), expected_BK)


@pytest.mark.contract
def test_a_source_is_read_and_drawn(
    ran: Callable[..., Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ran("own_source.py")
    rows = names["rows"]
    assert len({row.id for row in rows}) == len({row.image for row in rows}) == 64
    assert {row.condition for row in rows} == {0, 1, 2}
    with Image.open(tmp_path / "waves.png") as picture:
        assert picture.size == (576, 576)
    assert "after: pip install ./examples" in capsys.readouterr().out


@pytest.mark.contract
@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_its_source_and_its_strategy(
    tiny: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_named("waves")
    monkeypatch.chdir(tmp_path)
    init = next(words for words in commands("own_source.py") if words[0] == "init")
    ddm(*init)
    info = RowsInfo.of(prepare(Run.open(init[1]), execute=serial))
    assert (info.rows, info.classes) == (900, ("across", "upright", "round"))
    sample = next(words for words in commands("own_strategy.py") if words[0] == "sample")
    ddm(sample[0], tiny.url, *sample[2:], "--class", "3", "--num", "2")
    assert Path("samples.png").exists()
    refused = CliRunner().invoke(main, ["sample", tiny.url, "--strategy", "commit-2"])
    assert refused.exit_code == 1 and "commit-P (P in (0, 1])" in " ".join(refused.output.split())


@pytest.mark.contract
def test_two_runs_are_compared(
    ran: Callable[..., Ran], tiny: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_run(str(tmp_path / "other"), settings=SETTINGS, spread=0.2)
    (tmp_path / "tiny").symlink_to(tiny.url)
    comparison = ran("compare_runs.py", "tiny", other.url.rpartition("/")[2])["comparison"]
    assert [line["model"] for line in comparison.lines] == ["tiny: once", "other: once"]
    (difference,) = comparison.differences
    distances = [line["frechet"] for line in comparison.lines]
    assert difference.frechet == pytest.approx(distances[1] - distances[0])
    nearest = "tiny: once" if distances[0] < distances[1] else "other: once"
    assert f"nearest to real images: {nearest}" in capsys.readouterr().out
    with Image.open(tmp_path / "compare.png") as picture:
        assert picture.format == "PNG"
    assert "<!doctype html>" in (tmp_path / "compare.html").read_text().lower()
