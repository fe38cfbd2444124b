"""Compilation that nobody asked for: where it is tried, what the try leaves behind, and how it is done without."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from ddm_ray.errors import OutOfMemory
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.models import compiled
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, ROUTER, Artifact, expert
from ddm_ray.run.run import Run
from ddm_ray.train import engine as train_engine
from ddm_ray.train import worker
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.compiling import keep_code, try_code
from ddm_ray.train.engine import Engine
from ddm_ray.train.job import train_job
from ddm_ray.train.state import fingerprints
from ddm_ray.train.trial import RandomRows
from tests.conftest import ROOT
from tests.counted_graphs import counted_graphs
from tests.random_run import make_data, make_texts
from tests.train.conftest import SHORT
from tests.train.results import curve_of, difference, weights_of

pytestmark = pytest.mark.contract

EXPERT = expert(1)
MASKED = ("expert.model.patch_size=2", "expert.train.mask_ratio=0.75", "expert.train.unmasked_steps=2")
BF16 = ("expert.train.precision=bf16",)
NO_CODE = RuntimeError("no code for this GPU")


@pytest.fixture
def as_on_a_gpu(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has a worker here try to compile where nobody has said."""
    monkeypatch.setattr(train_engine, "compiles_unasked", lambda placement: placement.compile is None)
    with counted_graphs():
        yield


@pytest.mark.parametrize(
    ("asked", "zero_stage", "device", "expected"),
    [
        (None, 1, "cuda", True),
        (None, 0, "cuda", True),
        (None, 3, "cuda", False),
        (None, 1, "cpu", False),
        (False, 1, "cuda", False),
        (True, 1, "cuda", False),
    ],
)
def test_gpus_try_unless_somebody_has_said(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, zero_stage: int, device: str, expected: bool
) -> None:
    """Whatever their machine has: all ranks meet to tell each other what they lack."""
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    monkeypatch.setattr(train_engine, "own_device", lambda: torch.device(device))
    assert train_engine.compiles_unasked(TrainPlacement(compile=asked, zero_stage=zero_stage)) is expected


@pytest.mark.parametrize(
    ("settings", "artifact", "checkpointed"),
    [((), ROUTER, False), (BF16, MONOLITH, False), (MASKED, EXPERT, True), (None, EXPERT, False)],
    ids=["router", "bf16", "masked, checkpointed", "texts"],
)
def test_what_the_try_compiles_the_steps_find_compiled(
    as_on_a_gpu: None, tmp_path: Path, settings: tuple[str, ...] | None, artifact: Artifact, checkpointed: bool
) -> None:
    """Code of the blocks; that of the update is made by the first step. The try leaves what is trained as it was."""
    folder = str(tmp_path / "run")
    run = make_texts(folder) if settings is None else make_data(folder, settings=(*SHORT, *settings), num_rows=80)
    job = train_job(run, artifact)
    rows = RandomRows(run.config.data, 2, None)
    with counted_graphs("aot_eager") as graphs:
        engine = Engine(job.build(), job.train, TrainPlacement(activation_checkpointing=checkpointed))
        batches = RankBatches(job, rows, 0, 1, job.batch)
        before = fingerprints(engine.shards.owned())
        assert try_code(engine, job, batches, 1) == ""
        assert fingerprints(engine.shards.owned()) == before
        assert graphs.num == 1 and not graphs.breaks
        engine.accumulate(job.objective, batches.at(1, engine.device))
        norm = float(engine.step(1e-3))
        assert graphs.num == 2 and not graphs.breaks
    assert fingerprints(engine.shards.owned()) != before
    plain = Engine(job.build(), job.train, TrainPlacement(compile=False))
    plain.accumulate(job.objective, batches.at(1, plain.device))
    assert norm == pytest.approx(float(plain.step(1e-3)), rel=1e-6)


def raises(error: Exception) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise error

    return fails


fails = raises(NO_CODE)


def _runs(graph: Any, _: object) -> Any:
    return make_boxed_func(graph.forward)


BACKENDS: dict[str, Callable[..., Any]] = {
    "all": fails,
    "backward": aot_autograd(fw_compiler=_runs, bw_compiler=fails),
}
"""Compilers by what they fail at: code for the way back is made as late as it is first gone."""


@pytest.mark.parametrize("at", BACKENDS)
def test_what_cannot_be_compiled_trains_to_the_bit_as_it_does_uncompiled(
    as_on_a_gpu: None, quiet: Run, short_run: Run, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.compiler.set_default_backend(BACKENDS[at])
    worker.train(short_run.url, EXPERT, TrainPlacement())
    why = capsys.readouterr().err
    assert f"warning: {EXPERT}: trains uncompiled, which is slower: " in why and str(NO_CODE) in why
    beat = Attempt(short_run.store, EXPERT, 1).last_beat()
    assert str(NO_CODE) in beat["uncompiled"]
    for read in (curve_of, weights_of):
        assert difference(read(short_run, EXPERT), read(quiet, EXPERT)) == 0


def test_a_compiler_that_was_asked_for_and_fails_ends_the_training(as_on_a_gpu: None, short_run: Run) -> None:
    torch.compiler.set_default_backend(fails)
    with pytest.raises(Exception, match=str(NO_CODE)):
        worker.train(short_run.url, EXPERT, TrainPlacement(compile=True))


def test_too_little_memory_says_nothing_of_compilers(as_on_a_gpu: None, short_run: Run) -> None:
    """The next attempt takes fewer rows at once. The compiler wraps the error."""
    torch.compiler.set_default_backend(raises(torch.OutOfMemoryError("tried to allocate 20 GiB")))
    with pytest.raises(OutOfMemory, match="micro_batch 6: "):
        worker.train(short_run.url, EXPERT, TrainPlacement())


def test_a_lost_gpu_ends_the_attempt(as_on_a_gpu: None, short_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = torch.AcceleratorError("CUDA error: uncorrectable ECC error")
    monkeypatch.setattr(Engine, "make_code", raises(dead))
    with pytest.raises(torch.AcceleratorError, match="uncorrectable"):
        worker.train(short_run.url, EXPERT, TrainPlacement())


@pytest.mark.chaos
def test_padding_for_compiled_code_is_nobodys(tmp_path: Path) -> None:
    """Of parameters whose width puts others off: other ranks, or uncompiled ones, go on from its states and back.

    Where one rank can't compile none does, and it is said once, with the rank that can't.
    """
    settings = ("expert.model={patch_size: 2, width: 36, depth: 2, heads: 3}", *BF16)
    legs = [(2, "nothing"), (2, "compile"), (1, "nothing")]
    seen, stderr = on_ranks(tmp_path, legs, *settings)
    assert seen == [[True, True], [False, False], [True]]
    assert stderr.count("trains uncompiled") == 1 and "RuntimeError: no code for this GPU (rank 1 on " in stderr
    (tmp_path / "uncompiled").mkdir()
    seen, _ = on_ranks(tmp_path / "uncompiled", [(world, "compile") for world, _ in legs], *settings)
    assert seen == [[False, False], [False, False], [False]]
    runs = [Run.open(str(folder / "run")) for folder in (tmp_path, tmp_path / "uncompiled")]
    curves, weights = ([read(run, EXPERT) for run in runs] for read in (curve_of, weights_of))
    for name in curves[0]:
        torch.testing.assert_close(curves[0][name], curves[1][name], rtol=1e-4, atol=0)
    assert difference(*weights) < 1e-5


def on_ranks(folder: Path, legs: list[tuple[int, str]], *settings: str) -> tuple[list[list[bool]], str]:
    script = str(ROOT / "tests/train/one_cannot.py")
    command = [sys.executable, script, str(folder), json.dumps(legs), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


def test_code_is_kept_below_the_cache_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_code(None)
    (tmp_path / "file").touch()
    keep_code(str(tmp_path / "file"))
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    keep_code(str(tmp_path / "cache"))
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder == tmp_path / "cache/compiled" and folder.stat().st_mode & 0o777 == 0o700
