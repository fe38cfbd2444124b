"""A run that an earlier version finished opens whole, and gives the images that it gave.

`old_runs/` has an archive for each released version, and one for the version to come. The latter may be made again, by
`python -m tests.run.test_old_runs`; archives of released versions never change.
"""

import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from PIL import Image

from ddm_ray import __version__
from ddm_ray.jobs.examination import examine
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.run import Run

pytestmark = pytest.mark.contract

ARCHIVES = Path(__file__).parent / "old_runs"
SMALL = (
    "data.heldout=0.05",
    "partition.num_fine=4",
    *(f"{part}.{field}" for part in ("expert", "router") for field in ("model.width=16", "train.steps=20")),
)
COMMANDS = (
    f"init run --recipe tiny {' '.join(f'--set {setting}' for setting in SMALL)}",
    *("prepare run", "partition run", "train run all --monolith --student", "export run exported"),
    "copy run artifacts",  # the artifacts alone, without records of processes and machines
)


@pytest.fixture(params=sorted(ARCHIVES.glob("*.tar.xz")), ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the run, its export and an image of an archive."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_its_artifacts_are_finished_and_whole(old: Path) -> None:
    run = Run.open(str(old / "run"))
    findings = {str(finding.artifact): finding.error for finding in examine(run, deep=True)}
    assert {"rows", "partition", "experts/000", "experts/001", "router", "monolith", "student"} <= findings.keys()
    assert {name: error for name, error in findings.items() if error} == {}


@pytest.mark.parametrize("door", ["run", "exported"])
def test_it_gives_the_image_that_it_gave(old: Path, door: str) -> None:
    """But for the last bits, which depend on PyTorch and on the processor."""
    opened = DDMPipeline.from_run if door == "run" else DDMPipeline.from_pretrained
    image = np.asarray(opened(str(old / door))("3", seeds=1).images[0], dtype=int)
    with Image.open(old / "three.png") as stored:
        assert np.abs(image - np.asarray(stored.convert("L"), dtype=int)).max() <= 2


def test_this_version_has_one() -> None:
    assert (ARCHIVES / f"{__version__}.tar.xz").is_file()


def _make_archive() -> None:
    ddm = Path(sys.executable).parent / "ddm"
    with TemporaryDirectory() as folder:
        for command in COMMANDS:
            subprocess.run([ddm, *command.split()], cwd=folder, check=True)
        DDMPipeline.from_run(f"{folder}/run")("3", seeds=1).images[0].save(f"{folder}/three.png")
        ARCHIVES.mkdir(exist_ok=True)
        with tarfile.open(ARCHIVES / f"{__version__}.tar.xz", "w:xz", preset=9) as archive:
            for name, kept in {"exported": "exported", "artifacts": "run", "three.png": "three.png"}.items():
                archive.add(Path(folder) / name, kept)


if __name__ == "__main__":
    _make_archive()
