"""Compilation that nobody asked for: where it is tried, what the try leaves behind, and how it is done without."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from ddm_ray.errors import ConfigError
from ddm_ray.models import compiled
from ddm_ray.models.rows import rows_of_zeros
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.attempts import Attempt
from ddm_ray.storage.graph import MONOLITH, ROUTER, Artifact, expert
from ddm_ray.storage.run import Run
from ddm_ray.train import compiling, worker
from ddm_ray.train.engine import Engine
from ddm_ray.train.heldout import GROUPS, Schedule
from ddm_ray.train.job import train_job
from tests.conftest import ROOT
from tests.counted_graphs import counted_graphs
from tests.models.test_diffusers_transformer import NAMES
from tests.models.test_diffusers_transformer import network as of_diffusers
from tests.random_run import make_data, make_texts
from tests.train.conftest import SHORT
from tests.train.test_worker import curve_of, difference, weights_of

ROWS, EXPERT = GROUPS + 2, expert(1)
MASKED = ("expert.model.patch_size=2", "expert.train.mask_ratio=0.75", "expert.train.unmasked_steps=2")
BF16 = ("expert.train.precision=bf16",)
NO_CODE = RuntimeError("no code for this GPU")


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
    monkeypatch.setattr(compiling, "own_device", lambda: torch.device(device))
    assert compiling.to_be_tried(TrainPlacement(compile=asked, zero_stage=zero_stage)) is expected


@pytest.mark.parametrize(("lacks", "why"), [("g++", "there is no g"), ("triton", "there is no triton")])
def test_what_a_machine_lacks_is_named(short_run: Run, monkeypatch: pytest.MonkeyPatch, lacks: str, why: str) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None if lacks == "g++" else name)
    monkeypatch.setattr(compiling, "find_spec", lambda name: None if lacks == name else object())
    monkeypatch.setattr(compiling, "own_device", lambda: torch.device("cuda"))
    assert compiling.why_not(train_job(short_run, EXPERT), TrainPlacement(), ROWS, 1).startswith(why)


@pytest.mark.parametrize(
    ("settings", "artifact", "ways"),
    [
        ((), EXPERT, 1),
        ((), ROUTER, 1),
        (BF16, MONOLITH, 1),
        (MASKED, EXPERT, 2),
        (None, EXPERT, 1),
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
    """With gradients in each way that steps go, without them, and of the update one of another size.

    A step's last rows are fewer.
    """
    folder = str(tmp_path / "run")
    run = make_texts(folder) if settings is None else make_data(folder, settings=(*SHORT, *settings), num_rows=80)
    job = train_job(run, artifact)
    placement = TrainPlacement(compile=True, activation_checkpointing=checkpointed, heldout_rows=GROUPS)
    schedule = Schedule.of(job, placement)
    assert schedule
    rows_heldout = schedule.rows_at_once(ROWS, 1)
    sizes = {ROWS, job.batch % ROWS} - {0}
    assert rows_heldout not in sizes
    with counted_graphs("aot_eager") as graphs:
        assert compiling.why_not(job, placement, ROWS, 1) == ""
        assert graphs.num == len(sizes) * ways + 2 and not graphs.breaks
        engine = Engine(job.build(), job.train, placement)
        for step, rows in product((0, job.train.steps - 1), sizes):
            masking = job.masking(step)
            kept = None if masking is None else masking.num_kept
            inputs = rows_of_zeros(engine.model.module, rows, job.image_shape, job.text_tokens, kept)
            engine.backward(engine.model(*inputs).float().square().sum())
            assert torch.isfinite(engine.step(1e-3))
        inputs = rows_of_zeros(engine.model.module, rows_heldout, job.image_shape, job.text_tokens)
        with torch.no_grad(), engine.computing_with_ema() as model:
            model(*inputs)
        assert graphs.num == len(sizes) * ways + 3 and not graphs.breaks


def raises(error: Exception) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise error

    return fails


fails = raises(NO_CODE)


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
    worker.train(short_run.url, EXPERT, TrainPlacement())
    why = capsys.readouterr().err
    assert f"warning: {EXPERT}: trains uncompiled, which is slower: " in why and str(NO_CODE) in why
    beat = Attempt(short_run.store, EXPERT, 1).last_beat()
    assert str(NO_CODE) in beat["uncompiled"]
    plain = make_data(str(tmp_path / "plain"), settings=SHORT)
    worker.train(plain.url, EXPERT, TrainPlacement(compile=False))
    for read in (curve_of, weights_of):
        assert difference(read(short_run, EXPERT), read(plain, EXPERT)) == 0


def test_a_compiler_that_was_asked_for_and_fails_ends_the_training(as_on_a_gpu: None, short_run: Run) -> None:
    torch.compiler.set_default_backend(fails)
    with pytest.raises(Exception, match=str(NO_CODE)):
        worker.train(short_run.url, EXPERT, TrainPlacement(compile=True))


def test_what_can_be_compiled_is(as_on_a_gpu: None, short_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    made = []

    def counts(graph: Any, _: object) -> Any:
        made.append(graph)
        return graph.forward

    torch.compiler.set_default_backend(counts)
    worker.train(short_run.url, EXPERT, TrainPlacement(compile=None))
    assert made and "uncompiled" not in capsys.readouterr().err


FULL = [
    torch.OutOfMemoryError("tried to allocate 20 GiB"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    torch.AcceleratorError("CUDA error: out of memory"),
    MemoryError(),
]


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("in_compiler", [False, True])
def test_too_little_memory_says_nothing_of_compilers(
    short_run: Run, monkeypatch: pytest.MonkeyPatch, full: Exception, in_compiler: bool
) -> None:
    """An attempt before this one may still hold some: whether steps fit they tell themselves."""
    with counted_graphs():
        torch.compiler.set_default_backend(raises(full))
        if not in_compiler:
            monkeypatch.setattr(compiling, "_run", raises(full))
        assert compiling.why_not(train_job(short_run, EXPERT), TrainPlacement(), ROWS, 1) == ""


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize(("words", "final"), [("misaligned address", True), ("uncorrectable ECC error", False)])
def test_an_error_of_the_gpu_ends_the_launch_if_it_is_of_the_code(
    as_on_a_gpu: None, short_run: Run, monkeypatch: pytest.MonkeyPatch, words: str, final: bool, by_torch: bool
) -> None:
    """The process has lost its GPU, whoever said so first; another one meets bad code again, and no passing fault."""
    dead = torch.AcceleratorError(f"CUDA error: {words}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, raises(dead))
    monkeypatch.setattr(compiling, "_run", raises(dead if by_torch else RuntimeError(f"CUDA driver error: {words}")))
    job = train_job(short_run, EXPERT)
    if final:
        with pytest.raises(ConfigError, match=rf"compiling two blocks: .*{words}.* compile to false") as wrong:
            compiling.why_not(job, TrainPlacement(), ROWS, 1)
        assert not wrong.value.passes
    else:
        with pytest.raises(torch.AcceleratorError, match=words):
            compiling.why_not(job, TrainPlacement(), ROWS, 1)


def test_more_shapes_than_torch_compiles_for_are_no_success(short_run: Run) -> None:
    """It would go on uncompiled; a training begins with none."""
    job = train_job(short_run, EXPERT)
    with counted_graphs("aot_eager"):
        whys = [compiling.why_not(job, TrainPlacement(heldout_rows=0), rows, 1) for rows in range(2, 14)]
        assert whys[0] == "" and "recompile" in whys[-1]
        torch.compiler.reset()
        assert compiling.why_not(job, TrainPlacement(), 20, 1) == ""


@pytest.mark.parametrize(
    ("cannot", "why"), [("compile", "RuntimeError: no code for this GPU"), ("g++", "there is no no-such-compiler")]
)
def test_where_one_rank_cannot_none_compiles(tmp_path: Path, cannot: str, why: str) -> None:
    """And it is said once, with who it is."""
    seen, stderr = on_ranks(tmp_path, [(2, cannot)])
    assert seen == [[False, False]]
    assert stderr.count("trains uncompiled") == 1 and f"{why} (rank 1 on " in stderr


def test_padding_for_compiled_code_is_nobodys(tmp_path: Path) -> None:
    """Of parameters whose width puts others off: other ranks, or uncompiled ones, go on from its states and back."""
    settings = ("expert.model={patch_size: 2, width: 36, depth: 2, heads: 3}", *BF16)
    legs = [(2, "nothing"), (2, "compile"), (1, "nothing")]
    seen, _ = on_ranks(tmp_path, legs, *settings)
    assert seen == [[True, True], [False, False], [True]]
    (tmp_path / "uncompiled").mkdir()
    seen, _ = on_ranks(tmp_path / "uncompiled", [(world, "compile") for world, _ in legs], *settings)
    assert seen == [[False, False], [False, False], [False]]
    runs = [Run.open(str(folder / "run")) for folder in (tmp_path, tmp_path / "uncompiled")]
    curves, weights = ([read(run, EXPERT) for run in runs] for read in (curve_of, weights_of))
    for name in curves[0]:
        torch.testing.assert_close(curves[0][name], curves[1][name], rtol=1e-4, atol=0)
    assert difference(*weights) < 1e-5


def on_ranks(folder: Path, legs: list[tuple[int, str]], *settings: str) -> tuple[list[list[bool]], str]:
    command = [sys.executable, str(ROOT / "tests/train/one_cannot.py"), str(folder), json.dumps(legs), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


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
