"""`ddm demo` under faults: Ctrl-C, a killed worker, and the same command again."""

import json
import os
import re
import shutil
import signal
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from ddm_ray.cli import main
from ddm_ray.evaluate.apart import apart_in_words
from ddm_ray.jobs.attempts import claimed, heartbeat
from ddm_ray.run.graph import MONOLITH, ROUTER, evaluation
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_trained
from tests.conftest import BIN, heed_ctrl_c, wait_for
from tests.random_run import make_run
from tests.train.background import Background

# The cheapest network, and so many steps of it that a process can be killed in the middle of them.
VICTIM = ROUTER
LONGER = ("--set", "expert.train.steps=30", "--set", "router.train.steps=600")
OF_LIBRARIES = re.compile(r"raylet|\(pid=|\bINFO\b|\bWARN|Warning:|\[[0-9]{4}-")


def start(folder: str, log: Path) -> subprocess.Popen[bytes]:
    """`ddm demo --recipe tiny` in a process group of its own."""
    with log.open("ab") as sink:
        command = [str(BIN / "ddm"), "demo", "--recipe", "tiny", "--run", folder, *LONGER]
        return subprocess.Popen(
            command,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )


def check_end(run: Run, output: str) -> None:
    """The output ends with a sentence from the numbers, the report, the picture, and commands to go on with."""
    folder = f"{run.url}/{evaluation('demo')}"
    sentence = apart_in_words(json.loads(Path(f"{folder}/metrics.json").read_text()))
    assert sentence is not None
    before, _, after = output.partition(f"{folder}/mixture.png\n")
    assert sentence in " ".join(before.split()) and f"{folder}/report.html\n" in before
    assert after.startswith("\nnext:\n") and f"ddm sample {run.url} --class 9 " in after
    assert Image.open(f"{folder}/mixture.png").width > 1000


@pytest.mark.contract
def test_it_ends_with_a_sentence_and_a_picture(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"))
    done = CliRunner().invoke(main, ["demo", "--recipe", "tiny", "--run", run.url])
    assert done.exit_code == 0, done.output
    check_end(run, done.output)


@pytest.mark.chaos
def test_demo_survives_ctrl_c_and_a_killed_worker(tmp_path: Path) -> None:
    """The disturbed demo ends with the bits of a router that was trained without Ray, and samples with it.

    All else is finished before it begins; from nothing, it is `make demo`.
    """
    folder, log = str(tmp_path / "run"), tmp_path / "log"
    Background("quiet_run", str(tmp_path / "quiet"), json.dumps(LONGER[1::2])).finish()
    quiet = Run.open(str(tmp_path / "quiet"))
    shutil.copytree(quiet.url, folder)
    run = Run.open(folder)
    run.store.delete(VICTIM)
    demo = start(folder, log)
    states = Path(folder) / VICTIM / "attempts/0001/state"
    wait_for(lambda: list(states.glob("*/_MANIFEST.json")), 200, log.read_text)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert run.manifest(VICTIM) is None
    beat_before = heartbeat(run.store, VICTIM)
    assert beat_before

    demo = start(folder, log)

    def goes_on() -> bool:
        beat = heartbeat(run.store, VICTIM)
        return demo.poll() is not None or bool(
            beat and beat["attempt"] == 2 and beat.get("step", 0) > beat_before["step"]
        )

    wait_for(goes_on, 200, log.read_text)
    killed = heartbeat(run.store, VICTIM)
    assert killed and killed["step"] < killed["steps"], log.read_text()
    os.kill(killed["pid"], signal.SIGKILL)
    assert demo.wait(300) == 0, log.read_text()[-3000:]
    assert claimed(run.store, VICTIM) == [1, 2, 3]

    ours, theirs = load_trained(run, VICTIM).state_dict(), load_trained(quiet, VICTIM).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    cost = {artifact: run.require(artifact).info["training_flops"] for artifact in (*run.experts, MONOLITH)}
    assert sum(cost[artifact] for artifact in run.experts) == cost[MONOLITH]
    assert claimed(run.store, MONOLITH) == [1], "what was finished is left alone"

    assert run.finished(evaluation("demo"))
    files = {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}
    again = CliRunner().invoke(main, ["demo", "--recipe", "tiny", "--run", folder, *LONGER])
    assert again.exit_code == 0 and f"ddm sample {folder} --class 9 " in again.output
    assert files == {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}
    for output in (log.read_text(), again.output):
        check_end(run, output)
    assert not OF_LIBRARIES.search(log.read_text()), log.read_text()


@pytest.mark.contract
def test_the_first_command_after_it_makes_the_others_known(monkeypatch: pytest.MonkeyPatch) -> None:
    activation = import_module("ddm_ray.cli.demo")._activation  # `ddm_ray.cli.demo` is the command
    monkeypatch.setenv("PATH", str(BIN))
    assert activation() is None
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    line = activation()
    assert line is not None
    located = subprocess.run(f"{line} && command -v ddm", shell=True, capture_output=True, text=True, check=True)
    assert Path(located.stdout.strip()) == BIN / "ddm"
