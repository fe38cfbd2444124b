"""Devices: chosen, refused in one line, named to whoever asks, and GPUs that stand idle."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.cli.devices import device_of, placed, require_gpu, served_device, tell_of_workers
from ddm_ray.errors import ConfigError, SamplingError
from ddm_ray.placement import PreparePlacement, TrainPlacement
from ddm_ray.sampling import devices
from ddm_ray.sampling.devices import choose_device, idle_gpus
from tests.random_run import make_data, make_run


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that says that it sees two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"Pretended {number}")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without one; the folder in which its driver would name some."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "DRIVER_GPUS", tmp_path / "gpus")
    return tmp_path / "gpus"


def test_the_best_device_is_chosen_unasked(two_gpus: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_of("auto") == "cuda"
    assert capsys.readouterr().err == "device: cuda:0 (Pretended 0), one of 2 GPUs\n"
    assert device_of("cpu") == "cpu"
    printed = capsys.readouterr().err
    assert "device: cpu (" in printed
    assert "warning: a GPU stands idle (Pretended 0); --device cuda computes there" in printed


def test_without_a_gpu_all_is_computed_on_the_cpu(no_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_device("auto") == "cpu" and idle_gpus("cpu") is None
    (no_gpu / "0000:3b:00.0").mkdir(parents=True)
    assert device_of("auto") == "cpu"
    why = f"warning: a GPU stands idle, since this PyTorch ({torch.__version__}) can't use it: install one for CUDA\n"
    assert capsys.readouterr().err.endswith(why)


@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda", 99), 99, "gpu", "meta:one", None])
def test_a_device_that_is_not_there_is_refused_with_what_there_is(device: Any) -> None:
    with pytest.raises(SamplingError, match=r"^device '.*' isn't there: .*; choose cpu") as caught:
        choose_device(device)
    assert len(str(caught.value).splitlines()) == 1


def test_a_server_of_its_own_gets_the_named_gpu_alone(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddm_ray.sampling.devices.choose_device", lambda asked: asked)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for visible, chosen in ((None, "1"), ("4,7", "7")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert served_device("cuda:1", None) == "cuda"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen
    assert served_device("auto", "head:6379") == "auto", "the Ray that is joined says what it has"
    with pytest.raises(ConfigError, match="the Ray that is joined chooses the GPU; write cuda"):
        served_device("cuda:1", "head:6379")


def test_workers_are_placed_on_gpus_or_none() -> None:
    assert placed(TrainPlacement(), True).asked == {"GPU": 1.0, "CPU": 1.0}
    two = TrainPlacement(use_gpu=True, resources_per_worker={"CPU": 2, "GPU": 2})
    assert placed(two, None) is two and placed(two, True) is two
    assert placed(two, False).asked == {"CPU": 2.0}
    assert placed(PreparePlacement(), True).use_gpu and not placed(PreparePlacement(use_gpu=True), False).use_gpu


def test_idle_gpus_of_a_ray_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    tell_of_workers("train", use_gpu=False, gpus=2)
    printed = capsys.readouterr().err
    assert printed.startswith("device: workers train on the CPU\n")
    assert "warning: 2 GPUs of this Ray stand idle; --gpu has workers train there" in printed
    tell_of_workers("embed", use_gpu=True, gpus=2)
    assert capsys.readouterr().err == "device: workers embed on GPUs\n"


@pytest.mark.contract
@pytest.mark.parametrize("command", [["train", "router"], ["train", "all"], ["prepare"], ["plan"]])
def test_workers_of_a_private_ray_need_a_gpu_that_torch_sees(
    no_gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    require_gpu("head:6379")
    run = make_data(str(tmp_path / "run"), num_rows=60)
    if command == ["prepare"]:
        run.store.delete("rows")
    done = CliRunner().invoke(cli.main, [command[0], run.url, *command[1:], "--gpu"])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "error: --gpu: PyTorch sees no GPU on this machine; leave it out"
    assert "Traceback" not in done.output


def test_commands_say_what_computes(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), num_rows=60)
    rest = ["-n", "1", "--steps", "2", "-o", str(tmp_path / "x.png"), "--class", "3"]
    done = CliRunner().invoke(cli.main, ["sample", run.url, *rest, "--device", "cpu"])
    devices = [line for line in done.stderr.splitlines() if line.strip().startswith("device: cpu ")]
    assert (done.exit_code, len(devices)) == (0, 1), done.output
    done = CliRunner().invoke(cli.main, ["evaluate", run.url, "--device", "cuda:99"])
    assert done.exit_code == 1
    assert "error: device 'cuda:99' isn't there: " in done.stderr and "with --device" in done.stderr
    assert not (tmp_path / "run/eval").exists()
    for verb in (["sample"], ["serve"], ["evaluate"]):
        done = CliRunner().invoke(cli.main, [*verb, run.url, "--device", "gpu"])
        assert (done.exit_code, done.stderr) == (1, "error: --device 'gpu': write auto, cpu, cuda or cuda:N\n")
