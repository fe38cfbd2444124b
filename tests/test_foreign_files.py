"""No command touches files of a user's that lie in a folder it is given, the first time nor the second."""

import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.config import load_recipe
from ddm_ray.data.loading.cache import local_files
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.jobs.attempts import claim
from ddm_ray.run.graph import ROWS, expert, shard
from ddm_ray.run.manifest import Identity
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.foreign_files import plant, require_kept
from tests.random_run import make_run
from tests.run.artifacts import save_state

pytestmark = pytest.mark.integration

COMMANDS = {
    "export": ("export {run} {folder}", "export {run} {folder} --overwrite"),
    "export of a dense model": ("export {run} {folder} --model monolith", "export {run} {folder} --overwrite"),
    "sample": ("sample {run} -n 1 --out-dir {folder} -o {folder}/all.png --trace {folder}/trace.png",) * 2,
    "copy": ("copy {run} {folder} experts/000", "copy {run} {folder}"),
    "init": ("init {folder} --recipe tiny",) * 2,
    "partition": ("partition {prepared} --scratch {folder}", "partition {again} --scratch {folder}"),
}
"""What is called for a new folder, and, once the user's files lie in it, for that again."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose models are trained, and rows that are prepared."""
    root = tmp_path_factory.mktemp("made")
    make_run(str(root / "run"), num_rows=60)
    prepare(Run.create(str(root / "prepared"), load_recipe("tiny")), execute=serial)
    return root


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(*commands, id=name, marks=[pytest.mark.chaos] if name == "partition" else [])
        for name, commands in COMMANDS.items()
    ],
)
def test_a_command_leaves_the_users_files_alone(made: Path, tmp_path: Path, first: str, second: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("prepared", "again"):
        shutil.copytree(made / "prepared", tmp_path / name)
    words = {"run": made / "run", "folder": folder}
    words |= {name: tmp_path / name for name in ("prepared", "again")}
    call(first.format(**words))
    plant(folder)
    call(second.format(**words))
    require_kept(folder)


def call(command: str) -> str:
    """What a command that succeeds prints."""
    done = CliRunner().invoke(cli.main, shlex.split(command))
    assert done.exit_code == 0, done.output
    return done.output


def test_tidy_deletes_nothing_of_the_users(made: Path, tmp_path: Path) -> None:
    run = Run.open(str(shutil.copytree(made / "run", tmp_path / "run")))
    attempt = claim(run.store, expert(0))
    save_state(attempt, 5, Identity({}), {"rank-000/a": b"x"}, keep=2)
    folders = ("", ROWS, shard(0), expert(0), attempt.prefix)
    for folder in folders:
        plant(Path(run.url, folder))
    assert "deleted" in call(f"tidy {run.url} --delete") and not run.store.sizes(f"{attempt.prefix}/state")
    for folder in folders:
        require_kept(Path(run.url, folder))


def test_copies_in_a_cache_are_made_beside_the_users(made: Path, tmp_path: Path) -> None:
    """Those that are damaged are made once more."""
    own, bucket = Run.open(str(made / "run")), Store("memory:///")
    for name in own.store.sizes(shard(0)):
        bucket.write(f"{shard(0)}/{name}", own.store.read(f"{shard(0)}/{name}"))
    run, manifest = Run(bucket, own.config), own.require(shard(0))
    names = [name for name in manifest.files if name.endswith(".parquet")]
    with local_files(run, manifest, names, str(tmp_path)) as copies:
        plant(tmp_path)
        plant(tmp_path / manifest.digest)
        for copy in copies:
            copy.path.write_bytes(b"damaged")
    with local_files(run, manifest, names, str(tmp_path)):
        require_kept(tmp_path)
        require_kept(tmp_path / manifest.digest)
