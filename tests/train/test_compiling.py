"""Compilation that nobody asked for: where it is tried, what the try leaves behind, and how it is done without."""

import json
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
from ddm_ray.models import compiled
from ddm_ray.models.rows import rows_of_zeros
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.graph import MONOLITH, ROUTER, Artifact, expert
from ddm_ray.storage.run import Run
from ddm_ray.train import compiling, worker
from ddm_ray.train.engine import Engine
from ddm_ray.train.job import TrainJob, train_job
from tests.conftest import ROOT
from tests.counted_graphs import counted_graphs
from tests.models.test_diffusers_transformer import NAMES
from tests.models.test_diffusers_transformer import network as of_diffusers
from tests.random_run import make_data, make_texts
from tests.train.conftest import SHORT
from tests.train.test_worker import curve_of, difference, weights_of

ROWS = 4
MASKED = ("expert.model.patch_size=2", "expert.train.mask_ratio=0.75", "expert.train.unmasked_steps=2")
BF16 = ("expert.train.precision=bf16",)
NO_CODE = RuntimeError("no code for this GPU")


@pytest.mark.parametrize(
    ("asked", "zero_stage", "device", "lacks", "expected"),
    [
        (None, 1, "cuda", None, True),
        (None, 0, "cuda", None, True),
        (None, 3, "cuda", None, False),
        (None, 1, "cuda", "compiler", False),
        (None, 1, "cuda", "triton", False),
        (None, 1, "cpu", None, False),
        (False, 1, "cuda", None, False),
        (True, 1, "cuda", None, False),
    ],
)
def test_a_gpu_that_can_tries_unless_somebody_has_said(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, zero_stage: int, device: str, lacks: str | None, expected: bool
) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None if lacks == "compiler" else name)
    monkeypatch.setattr(compiled, "find_spec", lambda name: None if lacks == name else object())
    monkeypatch.setattr(compiling, "own_device", lambda: torch.device(device))
    assert compiling.to_be_tried(TrainPlacement(compile=asked, zero_stage=zero_stage)) is expected


@pytest.mark.parametrize(
    ("settings", "artifact", "ways"),
    [
        ((), expert(1), 1),
        ((), ROUTER, 1),
        (BF16, MONOLITH, 1),
        (MASKED, expert(1), 2),
        (None, expert(1), 1),
    ],
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_compiled_in_the_try_the_training_finds_compiled(
    world_of_one: None,
    tmp_path: Path,
    settings: tuple[str, ...] | None,
    artifact: Artifact,
    ways: int,
    checkpointed: bool,
) -> None:
    """With gradients in each way that steps go, without them, and of the update one of another size."""
    folder = str(tmp_path / "run")
    run = make_texts(folder) if settings is None else make_data(folder, settings=(*SHORT, *settings), num_rows=80)
    job = train_job(run, artifact)
    placement = TrainPlacement(compile=True, activation_checkpointing=checkpointed)
    with counted_graphs("aot_eager") as graphs:
        assert compiling.why_not(job, placement, ROWS) == ""
        assert graphs.num == 2 * ways + 1 and not graphs.breaks
        engine = Engine(job.build(), job.train, placement)
        for step in (0, job.train.steps - 1):
            masking = job.masking(step)
            kept = None if masking is None else masking.num_kept
            inputs = rows_of_zeros(engine.model.module, ROWS, job.image_shape, job.text_tokens, kept)
            engine.backward(engine.model(*inputs).float().square().sum())
            with torch.no_grad(), engine.computing_with_ema() as model:
                model(*inputs)
            assert torch.isfinite(engine.step(1e-3))
        assert graphs.num == 2 * ways + 2 and not graphs.breaks


def fails(*_: object) -> Any:
    """A compiler that fails at everything."""
    raise NO_CODE


def _runs(graph: Any, _: object) -> Any:
    return make_boxed_func(graph.forward)


def _fails_at_updates(graph: Any, inputs: list[torch.Tensor]) -> Any:
    if any("where" in str(node.target) for node in graph.graph.nodes):
        raise NO_CODE
    return graph.forward


BACKENDS: dict[str, Callable[..., Any]] = {
    "all": fails,
    "backward": aot_autograd(fw_compiler=_runs, bw_compiler=fails),
    "updates": _fails_at_updates,
}
"""Compilers by what they fail at: code for the way back is made as late as it is first gone."""


@pytest.fixture
def as_on_a_gpu(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has a worker here try to compile where nobody has said."""
    monkeypatch.setattr(worker, "to_be_tried", lambda placement: placement.compile is None)
    with counted_graphs():
        yield


@pytest.mark.parametrize("at", BACKENDS)
def test_what_cannot_be_compiled_trains_to_the_bit_as_it_does_uncompiled(
    as_on_a_gpu: None, short_run: Run, tmp_path: Path, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.compiler.set_default_backend(BACKENDS[at])
    worker.train(short_run.url, expert(1), TrainPlacement())
    why = capsys.readouterr().err
    assert f"warning: {expert(1)}: trains uncompiled, which is slower: " in why and str(NO_CODE) in why
    plain = make_data(str(tmp_path / "plain"), settings=SHORT)
    worker.train(plain.url, expert(1), TrainPlacement(compile=False))
    for read in (curve_of, weights_of):
        assert difference(read(short_run, expert(1)), read(plain, expert(1))) == 0


def test_a_compiler_that_was_asked_for_and_fails_ends_the_training(as_on_a_gpu: None, short_run: Run) -> None:
    torch.compiler.set_default_backend(fails)
    with pytest.raises(Exception, match=str(NO_CODE)):
        worker.train(short_run.url, expert(1), TrainPlacement(compile=True))


def test_what_can_be_compiled_is(as_on_a_gpu: None, short_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    made = []

    def counts(graph: Any, _: object) -> Any:
        made.append(graph)
        return graph.forward

    torch.compiler.set_default_backend(counts)
    worker.train(short_run.url, expert(1), TrainPlacement(compile=None))
    assert made and "uncompiled" not in capsys.readouterr().err


def test_too_little_memory_for_two_blocks_is_no_fault_of_the_compilers(
    as_on_a_gpu: None, short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills(job: TrainJob, placement: TrainPlacement, rows: int) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(compiling, "_run", fills)
    with pytest.raises(OutOfMemory, match=r"compiling two blocks, micro_batch \d+: .* 20 GiB"):
        worker.train(short_run.url, expert(1), TrainPlacement())


def test_where_one_rank_cannot_none_compiles(tmp_path: Path) -> None:
    script = ROOT / "tests/train/one_cannot.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [False, False]
    assert done.stderr.count("trains uncompiled") == 1 and "RuntimeError: no code for this GPU. `compile" in done.stderr


def test_code_is_kept_below_the_cache_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compiling.keep_code(None)
    (tmp_path / "file").touch()
    compiling.keep_code(str(tmp_path / "file"))
    assert "TORCHINDUCTOR_CACHE_DIR" not in compiling.os.environ
    compiling.keep_code(str(tmp_path / "cache"))
    folder = Path(compiling.os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder == tmp_path / "cache/compiled" and folder.stat().st_mode & 0o777 == 0o700


def test_blocks_of_all_kinds_are_left() -> None:
    """SD3's last block is unlike the others."""
    for name in NAMES:
        model = of_diffusers(name)
        kinds = {str(block) for blocks in compiled._lists_of_blocks(model) for block in blocks}
        compiled.leave_two_of_each(model)
        left = list(compiled._lists_of_blocks(model))
        assert {str(block) for blocks in left for block in blocks} == kinds
        assert all(len(blocks) <= 2 for blocks in left)
