"""A real Slurm of one machine, of this machine's user, from Debian's packages slurm-wlm and munge."""

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import BIN, ROOT, end, wait_for

INSTALLED = bool(os.getuid() == 0 and all(shutil.which(name) for name in ("slurmctld", "slurmd", "munged", "sbatch")))
# A job that is queued again waits for as long as its credentials last.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 Port={node} CPUs={cpus}
PartitionName=tests Nodes=ALL Default=YES
"""


@dataclass(frozen=True)
class Queue:
    """A queue with one machine, in a folder that is its user's home too."""

    folder: Path

    def command(self, *words: str) -> str:
        """Run a command of Slurm as a user of the queue, in the project's folder; what it printed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AWS_"))}
        environment |= {"PATH": f"{BIN}:{environment['PATH']}", "HOME": str(self.folder), "PYTHONPATH": str(ROOT)}
        environment["SLURM_CONF"] = str(self.folder / "slurm.conf")
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def idle(self) -> bool:
        """Whether its machine waits for a job."""
        with suppress(AssertionError):
            return self.command("sinfo", "--noheader", "--format=%T").strip() == "idle"
        return False

    def submit(self, *words: str) -> str:
        """Submit island.sbatch for what a small machine has; the job's number."""
        small = ("--nodes=1", f"--cpus-per-task={os.cpu_count()}", "--gpus-per-node=0")
        command = ("sbatch", "--parsable", *small, f"--output={self.folder}/%j.out")
        return self.command(*command, *words).strip()

    def job(self, number: str) -> dict[str, str]:
        """What the queue knows of a job: JobState, Restarts, ExitCode and more."""
        text = self.command("scontrol", "show", "job", "--oneliner", number)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait_for_state(self, number: str, state: str, seconds: float) -> None:
        """Wait until a job is in a state."""
        wait_for(lambda: self.job(number)["JobState"] == state, seconds, lambda: self.printed(number)[-3000:], every=1)

    def printed(self, number: str) -> str:
        """What a job has printed so far."""
        path = self.folder / f"{number}.out"
        return path.read_text() if path.exists() else ""


@contextmanager
def queue(folder: Path) -> Iterator[Queue]:
    """Start the three daemons in an empty folder; all of them have ended afterwards, and so have their jobs."""
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        ports = {"controller": first.getsockname()[1], "node": second.getsockname()[1]}
    folder.chmod(0o755)
    (folder / "spool").mkdir()
    (folder / "key").write_bytes(secrets.token_bytes(128))
    (folder / "key").chmod(0o400)
    configuration = CONFIGURATION.format(folder=folder, host=socket.gethostname(), cpus=os.cpu_count(), **ports)
    (folder / "slurm.conf").write_text(configuration)
    files = {"socket": "munge.socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    # /tmp, where the tests' folders lie, is everybody's: munged wants to be forced to use it.
    munged = ["munged", "-F", "--force", *(f"--{option}={folder / name}" for option, name in files.items())]
    slurm = [[name, "-D", "-f", str(folder / "slurm.conf")] for name in ("slurmctld", "slurmd")]
    started = Queue(folder)
    with ExitStack() as stack:
        sink = stack.enter_context((folder / "daemons").open("wb"))
        for command in (munged, *slurm):
            daemon = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
            stack.callback(end, daemon)
            if command is munged:
                wait_for((folder / "munge.socket").exists, 30)
        wait_for(started.idle, 60, (folder / "daemons").read_text)
        try:
            yield started
        finally:
            started.command("scancel", "--user=root")
            wait_for(lambda: not started.command("squeue", "--noheader"), 90)
