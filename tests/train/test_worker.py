"""The loop, on real DeepSpeed: resume, damage, rivals, world sizes, precision, cost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from ddm_ray.config import load_recipe
from ddm_ray.errors import DriftError, TrainingError
from ddm_ray.placement import Placement
from ddm_ray.storage.attempts import claimed
from ddm_ray.storage.run import MONOLITH, ROUTER, Run, shard
from ddm_ray.train import worker
from ddm_ray.train.attempt import TrainAttempt
from tests.random_run import make_data
from tests.train.conftest import SHORT

EXPERT = "experts/001"


class Killed(BaseException):
    """Stands for a process that goes away in the middle: nothing of ours catches it."""


def weights_of(run: Run, artifact: str) -> dict[str, torch.Tensor]:
    """The EMA weights that the job's manifest names."""
    info = run.require(artifact).info
    return load(run.read(artifact, f"{info['weights']}/ema.safetensors"))


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the next training end by Killed once `step` steps are saved."""
    save = TrainAttempt.save

    def save_and_die(self: TrainAttempt, done: int, *rest: object) -> None:
        save(self, done, *rest)  # type: ignore[arg-type]
        if done == step:
            raise Killed

    monkeypatch.setattr(TrainAttempt, "save", save_and_die)


def test_rows_changed_during_training_are_drift(
    world_of_one: None, short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record names the rows that were trained on, not those that lie there at the end."""
    save = TrainAttempt.save

    def save_and_change_rows(self: TrainAttempt, *rest: object) -> None:
        save(self, *rest)  # type: ignore[arg-type]
        short_run.store.delete(shard(1))
        short_run.store.write(f"{shard(1)}/train-00000.parquet", b"other rows")
        short_run.commit(shard(1), ["train-00000.parquet"], {})

    monkeypatch.setattr(TrainAttempt, "save", save_and_change_rows)
    worker.train(short_run.url, EXPERT, Placement(checkpoint_steps=8))
    with pytest.raises(DriftError, match="input partition/shards/cluster=001"):
        short_run.require(EXPERT)


@pytest.mark.parametrize("artifact", [EXPERT, ROUTER])
def test_resume_equals_uninterrupted_to_the_bit(
    world_of_one: None, short_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifact: str
) -> None:
    quiet = make_data(str(tmp_path / "quiet"), settings=SHORT)
    worker.train(quiet.url, artifact, Placement())
    with monkeypatch.context() as patch:
        kill_at(patch, 8)
        with pytest.raises(Killed):
            worker.train(short_run.url, artifact, Placement(checkpoint_steps=4))
    assert short_run.manifest(artifact) is None
    worker.train(short_run.url, artifact, Placement(checkpoint_steps=4))
    assert difference(weights_of(quiet, artifact), weights_of(short_run, artifact)) == 0
    assert claimed(short_run.store, artifact) == [1, 2]
    said = [{key: run.require(artifact).info[key] for key in ("step", "loss")} for run in (quiet, short_run)]
    assert said[0] == said[1]
    worker.train(short_run.url, artifact, Placement())
    assert claimed(short_run.store, artifact) == [1, 2], "a finished job claims no attempt"


def test_damaged_state_is_named_and_the_one_before_it_used(
    world_of_one: None,
    short_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    quiet = make_data(str(tmp_path / "quiet"), settings=SHORT)
    worker.train(quiet.url, EXPERT, Placement())
    with monkeypatch.context() as patch:
        kill_at(patch, 8)
        with pytest.raises(Killed):
            worker.train(short_run.url, EXPERT, Placement(checkpoint_steps=4))
    newest = Path(short_run.url) / EXPERT / "attempts/0001/state/step-000000008/state.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    worker.train(short_run.url, EXPERT, Placement())
    assert str(newest) in capfd.readouterr().err
    assert difference(weights_of(quiet, EXPERT), weights_of(short_run, EXPERT)) == 0


def test_a_state_of_another_configuration_is_refused(
    world_of_one: None, short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, 4)
        with pytest.raises(Killed):
            worker.train(short_run.url, EXPERT, Placement(checkpoint_steps=4))
    other = load_recipe("tiny", (*SHORT, "expert.train.learning_rate=0.002"))
    monkeypatch.setattr(Run, "open", classmethod(lambda cls, url: Run(short_run.store, other)))
    with pytest.raises(DriftError, match=r"expert\.train\.learning_rate: 0\.001 -> 0\.002"):
        worker.train(short_run.url, EXPERT, Placement())


def test_a_gradient_that_is_not_finite_publishes_nothing(
    world_of_one: None, short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddm_ray.train import batches

    draw = batches.draw

    def poisoned(seed: int, key: tuple[int, ...], step: int, *rest: object) -> object:
        draws = draw(seed, key, step, *rest)  # type: ignore[arg-type]
        if step == 6:
            draws.noise_BCHW[0, 0, 0, 0] = float("nan")
        return draws

    monkeypatch.setattr(batches, "draw", poisoned)
    with pytest.raises(TrainingError, match=r"gradient norm (nan|inf) at step 6"):
        worker.train(short_run.url, EXPERT, Placement(checkpoint_steps=1))
    assert short_run.manifest(EXPERT) is None
    states = short_run.store.folders(f"{EXPERT}/attempts/0001/state")
    assert states == ["step-000000005", "step-000000006"]


def test_micro_batches_do_not_change_the_run(world_of_one: None, short_run: Run, tmp_path: Path) -> None:
    other = make_data(str(tmp_path / "micro"), settings=SHORT)
    worker.train(short_run.url, EXPERT, Placement())
    worker.train(other.url, EXPERT, Placement(micro_batch=4))
    assert difference(weights_of(short_run, EXPERT), weights_of(other, EXPERT)) < 1e-5


def test_experts_together_cost_what_the_monolith_costs(world_of_one: None, short_run: Run) -> None:
    for artifact in (*short_run.experts, MONOLITH, ROUTER):
        worker.train(short_run.url, artifact, Placement())
    cost = {
        artifact: short_run.require(artifact).info["training_flops"]
        for artifact in (*short_run.experts, MONOLITH, ROUTER)
    }
    assert sum(cost[artifact] for artifact in short_run.experts) == cost[MONOLITH] > cost[ROUTER] > 0


def test_world_sizes_stages_and_precisions(tmp_path: Path) -> None:
    """Real ranks over gloo: 1, 2 and 3 of them (unequal shares), ZeRO 1 and 2, resumed at another size, bf16."""
    command = [sys.executable, str(Path(__file__).parent / "ranks.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = {name: Run.open(str(tmp_path / name)) for name in json.loads(done.stdout.splitlines()[-1])}
    found = {name: weights_of(run, EXPERT) for name, run in runs.items()}
    for name in ("world2-zero1", "world3-zero2", "world2-then-1"):
        assert difference(found["world1-zero1"], found[name]) < 2e-6, name
    assert 0 < difference(found["world1-zero1"], found["world2-bf16"]) < 2e-2
    assert all(torch.isfinite(tensor).all() for tensor in found["world2-bf16"].values())
