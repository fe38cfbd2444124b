"""`ddm work` as Slurm and SkyPilot start it, and again while it exits with 75: by what their files run.

Neither is here: with a real Slurm tests/test_slurm.py runs it.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT, wait_for
from tests.engines import AGAIN_OR_NOT, Machine, blocks, document, understood, words_of

pytestmark = pytest.mark.contract

SKYPILOT = document("skypilot/island.yaml")
SBATCH = ROOT / "cluster_configs/slurm/island.sbatch"
DIRECTIVES = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", SBATCH.read_text(), re.MULTILINE))
START_RAY = str(ROOT / "cluster_configs/start_ray.py")
AGAIN = str(ROOT / "cluster_configs/again.sh")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine.at(tmp_path)
    yield machine
    for options in machine.rays():
        with suppress(OSError):
            Path(options["temp_dir"]).parent.rmdir()


@pytest.mark.parametrize("path", sorted((ROOT / "cluster_configs").rglob("*.s[hb]*")), ids=lambda path: path.name)
def test_scripts_can_be_run(path: Path) -> None:
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)


# Again, while it exits with 75.


@pytest.mark.parametrize(("ends", "status"), AGAIN_OR_NOT)
def test_only_75_is_tried_again(machine: Machine, ends: str, status: int) -> None:
    assert machine.run(AGAIN, "30", "ddm", "work", "s3://lab/run 7", ends=ends) == status
    assert machine.calls("ddm") == [["work", "s3://lab/run 7"]] * len(ends.split())


def test_nothing_is_tried_after_sigterm(machine: Machine) -> None:
    assert machine.terminate_once_at_work(machine.start(AGAIN, "30", "ddm", "work", ends="75 stay 0")) == 75
    assert len(machine.calls("ddm")) == 2
    assert (machine.folder / "errors").read_text() == "again.sh: again in 30 s\n"


# Ray, until its node lives.


def start_ray(machine: Machine) -> "subprocess.Popen[bytes]":
    """A head, by the script that all others call."""
    return machine.start(START_RAY, "--head", "--temp-dir", str(machine.folder / "temp/ray"))


@pytest.mark.parametrize(("times", "status", "starts"), [(2, 0, 3), (3, 1, 3)])
def test_a_ray_that_gives_up_is_started_three_times(machine: Machine, times: int, status: int, starts: int) -> None:
    (machine.folder / "gives_up").write_text("\n" * times)
    with start_ray(machine) as process:
        if status == 0:
            wait_for((machine.folder / "head").exists, 60)
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == status
    assert len(machine.rays()) == starts
    assert (machine.folder / "errors").read_text().count("didn't start; again in") == 2


def test_a_ray_that_has_lived_is_not_started_again(machine: Machine) -> None:
    with start_ray(machine) as process:
        wait_for((machine.folder / "head").exists, 60)
        os.kill(int((machine.folder / "ray").read_text()), signal.SIGKILL)
        assert process.wait(60) == 128 + signal.SIGKILL
    assert len(machine.rays()) == 1


def test_no_ray_is_started_after_sigterm(machine: Machine) -> None:
    (machine.folder / "gives_up").write_text("\n" * 3)
    with start_ray(machine) as process:
        wait_for((machine.folder / "errors").read_text, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
    assert len(machine.rays()) == 1


# Slurm.


def island_of_slurm(machine: Machine, ends: str = "0", job: int = 4242, **more: str) -> "subprocess.Popen[bytes]":
    ((_, script, *words),) = words_of("".join(blocks("Slurm")), "sbatch")
    assert ROOT / script == SBATCH
    variables = {"JOB_ID": str(job), "JOB_NODELIST": "first,second", "JOB_NUM_NODES": DIRECTIVES["nodes"]}
    variables |= {"CPUS_PER_TASK": DIRECTIVES["cpus-per-task"], **more}
    return machine.start(script, *words, ends=ends, **{f"SLURM_{name}": value for name, value in variables.items()})


@pytest.mark.parametrize(("seconds", "status"), [(360, 1), (900, 0)])
def test_a_slurm_job_shorter_than_its_warning_is_refused(machine: Machine, seconds: int, status: int) -> None:
    job = island_of_slurm(machine, JOB_END_TIME=str(int(time.time()) + seconds))
    assert job.wait(120) == status
    assert bool(machine.calls("ddm")) == (status == 0)
    errors = (machine.folder / "errors").read_text()
    assert ("give it --time=15 or more" in errors) == (status == 1)


def test_slurm_starts_ray_on_all_machines_and_works(machine: Machine) -> None:
    job = island_of_slurm(machine, "stay")
    wait_for(lambda: len(machine.rays()) == 2, 60)
    home = machine.folder / ".ddm/slurm-4242"
    assert len((home / "token").read_text()) == 64
    assert machine.terminate_once_at_work(job) == 75
    (words,) = machine.calls("ddm")
    assert understood(words)["address"] == "10.0.0.7:24200"
    head, other = machine.rays()
    assert (head["head"], head["port"], head["node_ip_address"]) == (True, 24200, "10.0.0.7")
    assert (other["head"], other["address"]) == (False, "10.0.0.7:24200")
    for each in (head, other):
        assert each["block"] and each["num_cpus"] == int(DIRECTIVES["cpus-per-task"])
    for step in machine.calls("srun"):
        assert f"--cpus-per-task={DIRECTIVES['cpus-per-task']}" in step
        assert ("--nodelist=first" in step) != ("--exclude=first" in step)
    assert (machine.folder / "token_modes").read_text() == "600\n"
    assert not home.exists()


@pytest.mark.parametrize(("ends", "status"), [("0", 0), ("1", 1), ("75", 75), ("137", 137)])
def test_slurm_queues_again_what_ends_with_75(machine: Machine, ends: str, status: int) -> None:
    with island_of_slurm(machine, ends) as job:
        assert job.wait(60) == status
    again = [call for call in machine.calls("scontrol") if call[0] == "requeue"]
    assert again == ([["requeue", "4242"]] if status == 75 else [])


def test_slurm_does_not_queue_again_what_is_cancelled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_STATE", "CANCELLED")
    assert machine.terminate_once_at_work(island_of_slurm(machine, "stay")) == 75
    assert not [call for call in machine.calls("scontrol") if call[0] == "requeue"]


def test_slurm_has_a_state_saved_and_is_queued_again(machine: Machine) -> None:
    assert machine.terminate_once_at_work(island_of_slurm(machine, "stay")) == 75
    assert machine.calls("scontrol")[-1] == ["requeue", "4242"]
    signal_name, _, seconds = DIRECTIVES["signal"].partition("@")
    assert signal_name == "B:TERM" and int(seconds) >= 120
    assert {"requeue", "no-kill"} <= DIRECTIVES.keys() and DIRECTIVES["open-mode"] == "append"


def test_jobs_of_slurm_share_no_port(machine: Machine) -> None:
    ports: list[int] = []
    for job in (4242, 4243):
        # The other job's head isn't healthy because one of before was.
        (machine.folder / "head").unlink(missing_ok=True)
        with island_of_slurm(machine, job=job) as process:
            assert process.wait(60) == 0
    for options in (each for each in machine.rays() if each["head"]):
        named = [value for name, value in options.items() if name.endswith("port") and isinstance(value, int)]
        assert len(named) >= 11 and len({*named}) == len(named)
        assert all(options["port"] <= port < options["port"] + 100 for port in named)
        ports += named
    assert len({*ports}) == len(ports) > 20 and max(ports) < 32768  # where ports of others begin


def test_the_placement_for_slurm_is_of_its_machines() -> None:
    ((_, _, *words),) = words_of("".join(blocks("Slurm")), "sbatch")
    workers = understood(["work", *words])["trained"].workers
    gpus_of_node = int(DIRECTIVES["gpus-per-node"])
    assert (workers.min, workers.max) == (gpus_of_node, gpus_of_node * int(DIRECTIVES["nodes"]))
    assert DIRECTIVES["ntasks-per-node"] == "1"


def test_a_machine_without_a_token_is_not_started(machine: Machine) -> None:
    assert machine.run("cluster_configs/machine.sh", "24000", "head") == 1
    assert machine.calls("ray") == []


# SkyPilot.


def test_skypilot_recovers_from_75_alone() -> None:
    recovery = SKYPILOT["resources"]["job_recovery"]
    assert recovery == {"recover_on_exit_codes": [75], "max_restarts_on_errors": 0}


def start_by_skypilot(machine: Machine, rank: int, ends: str = "0", **envs: str) -> "subprocess.Popen[bytes]":
    """The task on one of two nodes."""
    nodes = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "RAY_AUTH_TOKEN": "secret"}
    return machine.start("bash", "-c", SKYPILOT["run"], ends=ends, **(SKYPILOT["envs"] | nodes | envs))


def run_by_skypilot(machine: Machine, rank: int, ends: str = "0", **envs: str) -> int:
    """Its exit status."""
    with start_by_skypilot(machine, rank, ends, **envs) as process:
        return process.wait(60)


@pytest.mark.parametrize("status", [0, 1, 75])
def test_the_first_node_of_skypilot_works(machine: Machine, status: int) -> None:
    assert run_by_skypilot(machine, 0, str(status)) == status
    (words,) = machine.calls("ddm")
    options = understood(words)
    (start,) = machine.rays()
    assert (start["head"], options["address"]) == (True, f"{start['node_ip_address']}:{start['port']}")
    assert options["only"] == ("expert:0",)
    assert {options["trained"].workers.max} == {*SKYPILOT["resources"]["accelerators"].values()}


def test_without_a_model_it_takes_what_nobody_trains(machine: Machine) -> None:
    assert run_by_skypilot(machine, 0, ISLAND="west", ONLY="") == 0
    options = understood(machine.calls("ddm")[0])
    assert (options["island"], options["only"]) == ("west", ())


def test_another_node_of_skypilot_is_of_the_firsts_ray(machine: Machine) -> None:
    (machine.folder / "head").touch()
    with start_by_skypilot(machine, 1) as process:
        wait_for(machine.rays, 60)
        (start,) = machine.rays()
        os.kill(int((machine.folder / "ray").read_text()), signal.SIGTERM)  # as its head ends
        assert process.wait(60) == 0
    assert (start["head"], start["address"]) == (False, "10.0.0.7:20000")
    assert machine.calls("ddm") == []


def test_islands_of_skypilot_are_given_what_it_asks_for() -> None:
    (block,) = blocks("SkyPilot")
    (words,) = words_of(block.replace("$k", "3"), "sky")
    for option, names in (("--env", {"ISLAND", "ONLY"}), ("--secret", {*SKYPILOT["secrets"]})):
        given = {words[index + 1].partition("=")[0] for index, word in enumerate(words) if word == option}
        assert given == names <= {*SKYPILOT["envs"], *SKYPILOT["secrets"]}
