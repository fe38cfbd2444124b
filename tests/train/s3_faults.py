"""Training on an S3 server that misbehaves for a while, by seeded schedules, in processes without Ray.

As a program, `python -m tests.train.s3_faults`, it is what trains: for each line of JSON on its input it forks a
process that trains an artifact, an expert unless it says otherwise, and prints how that ended. It only forks: storage's
threads don't survive it.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ddm_ray.jobs.attempts import claimed
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.run import Run
from ddm_ray.store.retries import LONG_RETRIES, RetryPolicy
from tests.conftest import ROOT
from tests.data.s3 import upload
from tests.random_run import make_data
from tests.s3_wire import Fault, Request, Wire, wire
from tests.train.ranks import EXPERT

SHORT = ("expert.train.steps=12", "expert.train.batch=6")
PLACEMENT = TrainPlacement(checkpoint_steps=3, milestone_steps=6)
MOMENTS = {
    "start": "^GET ",
    "claim": r"^PUT .*/CLAIM$",
    "mid": r"^PUT .*/state/step-000000003/",
    "milestone": r"^PUT .*/weights/step-000000006/",
    "save": r"^PUT .*/state/step-000000012/",
    "publish": r"^PUT .*/weights/step-000000012/",
    "commit": rf"^PUT .*/{EXPERT}/_MANIFEST.json$",
}
"""Patterns of the requests that trouble begins with, by what training is about then."""
TROUBLES = (
    (Fault.DROPPED, 1.0, 120.0),
    (Fault.LOST, 1.0, None),
    (Fault.UNAVAILABLE, 0.3, 3600.0),
    (Fault.DENIED, 1.0, 60.0),
    (Fault.HANGS, 1.0, 120.0),
    (Fault.CONFLICT, 1.0, None),
    (Fault.UNAVAILABLE, 1.0, 120.0),
    (Fault.BROKEN, 0.3, 3600.0),
)
"""Faults, which share of the requests they befall, and for how many seconds at most; without: just a few PUTs."""
SHORTEST, FEW, ANSWER_SECONDS = 5.0, 3, 30.0
AT_A_PUT = {Fault.BELIED: 1, Fault.LOST: 1, Fault.UNAVAILABLE: 5, Fault.HANGS: 1, Fault.DENIED: 1}
"""What may befall each single PUT, and how many of the requests of its key in a row."""


@dataclass(frozen=True)
class Schedule:
    """A fault that befalls a share of all requests for `seconds` from a moment on, or a few PUTs of that moment."""

    seed: int
    moment: str
    fault: Fault
    share: float
    seconds: float | None

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        """The schedule of a seed: seeds in a row meet all troubles, and in the end each at all moments."""
        fault, share, longest = TROUBLES[seed % len(TROUBLES)]
        moment = list(MOMENTS)[(seed + seed // len(TROUBLES)) % len(MOMENTS)]
        seconds = random.Random(seed).uniform(SHORTEST, longest) if longest else None
        return cls(seed, moment, fault, share, seconds)

    def __str__(self) -> str:
        much = f"{self.seconds:.0f} s" if self.seconds else "a few PUTs"
        return f"seed {self.seed}: {self.fault.name} of {self.share:.0%} for {much} from {self.moment} on"

    def rule(self, scale: float) -> Callable[[Request], Fault | None]:
        """The wire's rule, which makes it happen `scale` times as fast."""
        chance, began, met = random.Random(self.seed), None, 0
        pattern = "^PUT " if self.seconds is None and self.moment == "start" else MOMENTS[self.moment]

        def rule(request: Request) -> Fault | None:
            nonlocal began, met
            matches = request.matches(pattern)
            if self.seconds is None:
                met += matches
                return self.fault if matches and met <= 1 + self.seed % FEW else None
            began = began or (request.at if matches else None)
            lasts = began is not None and request.at < began + self.seconds / scale
            return self.fault if lasts and chance.random() < self.share else None

        return rule


@dataclass(frozen=True)
class OnePut:
    """A fault that befalls the PUT numbered `number`, from 0, of a training, and those of its key that follow."""

    number: int
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault.name} x {AT_A_PUT[self.fault]} at PUT {self.number}"

    def rule(self, _: float) -> Callable[[Request], Fault | None]:
        """The wire's rule."""
        puts, met, key = 0, 0, ""

        def rule(request: Request) -> Fault | None:
            nonlocal puts, met, key
            if request.method != "PUT":
                return None
            key = request.key if puts == self.number else key
            puts += 1
            if request.key != key or met == AT_A_PUT[self.fault]:
                return None
            met += 1
            return self.fault

        return rule


@dataclass(frozen=True)
class Outcome:
    """What became of a training: its exit code, its attempts, the expert's files, and how often it was refused.

    `rate`: refused requests a second, of the scaled ones, of the trouble; None where it took less than ten of them.
    `puts`: number of its PUTs.
    """

    status: int
    attempts: int
    files: dict[str, bytes]
    refused: int
    rate: float | None
    puts: int


def files_of(run: Run) -> dict[str, bytes]:
    """What a finished expert holds, by name; nothing of one that isn't finished."""
    if not (manifest := run.finished(EXPERT)):
        return {}
    weights = TrainedInfo.of(manifest).weights
    names = ("curve.safetensors", "ema.safetensors", "model.json")
    return {name: run.read(EXPERT, f"{weights}/{name}", manifest) for name in names}


class Trainer:
    """Trains experts of runs in the bucket of a server, each by a process of its own, `scale` times as hastily."""

    def __init__(self, server: str, base: Path, log: Path, scale: float):
        self.server, self.scale, self.log = server, scale, log
        self._base, self._runs = base, 0
        pauses = {
            name: getattr(LONG_RETRIES, name) / scale for name in ("first_pause", "longest_pause", "longest_denied")
        }
        self._patience = {**asdict(LONG_RETRIES), **pauses}
        command = [sys.executable, "-m", "tests.train.s3_faults"]
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True, cwd=ROOT
            )

    def make_run(self) -> str:
        """Put a new run into the bucket; its URI."""
        url = upload(self._base, f"run-{self._runs}")
        self._runs += 1
        return url

    def train(self, schedule: Schedule | OnePut | None = None) -> Outcome:
        """Train an expert of a new run, undisturbed or by a schedule."""
        url = self.make_run()
        with wire(self.server) as through:
            if schedule:
                through.rule = schedule.rule(self.scale)
            status = self.train_on(url, through)
            run, refused, puts = Run.open(url), through.refused(), through.counts()["PUT"]
        files = files_of(run)
        took = self.scale * (refused[-1].at - refused[0].at) if refused else 0.0
        return Outcome(
            status,
            len(claimed(run.store, EXPERT)),
            files,
            len(refused),
            len(refused) / took if took >= 10.0 else None,
            puts,
        )

    def train_on(self, url: str, through: Wire) -> int:
        """Train the expert of a run, whose storage is reached through a proxy; how that ended."""
        assert self.process.stdin and self.process.stdout
        # So long obstore waits for an answer.
        environment = {
            "AWS_ENDPOINT_URL": through.url,
            "AWS_TIMEOUT": f"{max(1000 * ANSWER_SECONDS / self.scale, 1000):.0f}ms",
        }
        task = {"url": url, "retry_policy": self._patience, "environment": environment}
        print(json.dumps(task), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline() or -1)


@contextmanager
def trainer(server: str, folder: Path, scale: float) -> Iterator[Trainer]:
    """A trainer, whose runs are copies of one, with real digits."""
    make_data(str(folder / "base"), settings=SHORT)
    started = Trainer(server, folder / "base", folder / "log", scale)
    try:
        yield started
    finally:
        assert started.process.stdin
        started.process.stdin.close()
        started.process.wait(60)


def main() -> None:
    """Train what each line says; a line for each, with the exit code."""
    from ddm_ray.train import local
    from tests.train import preloaded  # noqa: F401

    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.update(task["environment"])
            print(f"{time.strftime('%X')} {task['url']}", file=sys.stderr, flush=True)
            artifact, retry_policy = Artifact(task.get("artifact", EXPERT)), RetryPolicy(**task["retry_policy"])
            placement = TrainPlacement.model_validate(task.get("placement", PLACEMENT.model_dump()))
            local.train_locally(task["url"], [artifact], placement, retry_policy)
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
