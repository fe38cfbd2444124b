"""`ddm demo` under faults: Ctrl-C, a killed worker, and the same command again."""

import json
import os
import signal
import subprocess
from pathlib import Path

import torch

from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.checkpoint import load_model
from ddm_ray.storage.attempts import claimed, heartbeat
from ddm_ray.storage.run import MONOLITH, ROUTER, Run, evaluation
from tests.conftest import BIN, wait_for


def start(folder: str, log: Path) -> subprocess.Popen[bytes]:
    """`ddm demo --recipe tiny` in a process group of its own."""
    with log.open("ab") as sink:
        command = [str(BIN / "ddm"), "demo", "--recipe", "tiny", "--run", folder]
        return subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)


def test_demo_survives_ctrl_c_and_a_killed_worker(finished_run: Run, tmp_path: Path) -> None:
    """The disturbed demo ends with the same bits as the doors' quiet run of the same recipe."""
    folder, log = str(tmp_path / "run"), tmp_path / "log"
    demo = start(folder, log)
    states = Path(folder) / "experts/000/attempts/0001/state"
    wait_for(lambda: list(states.glob("*/_MANIFEST.json")), 200, log.read_text)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    run = Run.open(folder)
    assert run.manifest("experts/000") is None

    demo = start(folder, log)
    jobs = (*run.experts, ROUTER, MONOLITH)
    victim: list[str] = []

    def training() -> bool:
        begun = [a for a in jobs if len(claimed(run.store, a)) > 1 and not run.manifest(a)]
        victim[:] = [a for a in begun if (heartbeat(run.store, a) or {}).get("attempt", 1) > 1]
        return bool(victim) or demo.poll() is not None

    wait_for(training, 200, log.read_text)
    assert victim, log.read_text()
    killed = heartbeat(run.store, victim[0])
    assert killed is not None
    os.kill(killed["pid"], signal.SIGKILL)
    assert demo.wait(300) == 0, log.read_text()[-3000:]
    assert len(claimed(run.store, victim[0])) > killed["attempt"]

    for artifact in jobs:
        ours, theirs = load_model(run, artifact).state_dict(), load_model(finished_run, artifact).state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), artifact
    images = [
        DDMPipeline.from_run(made)(["3", "8"], seeds=[1, 2], output_type="pt").images for made in (run, finished_run)
    ]
    assert torch.equal(images[0], images[1])

    report = evaluation("demo")
    assert json.loads(run.read(report, "metrics.json"))["models"]
    files = {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}
    again = start(folder, log)
    assert again.wait(60) == 0
    assert files == {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}
    said = log.read_text()
    for name in ("report.html", "grid.png", "metrics.json"):
        assert f"{run.url}/{report}/{name}" in said
