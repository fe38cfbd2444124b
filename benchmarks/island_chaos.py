"""Random faults on islands that pull: three Ray clusters in network namespaces, which share an S3 server alone.

Each run is one of `digits` in two clusters, with longer trainings, kept started by `ddm launch`. One island of the
three is soon idle, so that it is seen how long a takeover takes, not how long the others are busy. At a seeded moment
an island that trains loses its head (which a service starts again), is gone for good, is cut off from all others for a
while, or is drained; or the launcher is killed and started again, or a second one is started. Once all is finished,
what was trained is compared, bit by bit, with the same trained alone. Needs root, iproute2 and moto.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from claims import Claim, Report, options  # noqa: E402

from ddm_ray.errors import DDMError  # noqa: E402
from ddm_ray.jobs.attempts import Attempt, claimed  # noqa: E402
from ddm_ray.jobs.status import status  # noqa: E402
from ddm_ray.run.graph import Artifact, wanted_of  # noqa: E402
from ddm_ray.run.run import Run  # noqa: E402
from tests.conftest import BIN, ddm, wait_for  # noqa: E402
from tests.data.s3 import s3_server, upload  # noqa: E402
from tests.islands.network import Machine, Network, lacks, network  # noqa: E402
from tests.processes import command, family  # noqa: E402
from tests.s3_wire import leading_through  # noqa: E402
from tests.train.results import checksums_of  # noqa: E402

NAMES = ("north", "south", "west")
CHECKPOINT_STEPS = 1000
LOOK_SECONDS = 0.5
GRACE_SECONDS = 60.0
MOST_SECONDS = 60.0
"""Longest time beyond the grace from a fault to the artifact's next step."""
# A service on the island: what ends is started again.
ISLAND = """
export HOME=$1; mkdir -p $HOME
while true; do cluster_configs/local/island.sh 0 1 --dashboard-host 0.0.0.0; sleep 1; done
"""
PLACEMENT = """
  {name}:
    jobs: http://{address}:20001
    token_file: {home}/.ddm/island-0/token
    checkpoint_steps: {steps}
"""


class Cause(Enum):
    """What may happen to an island, or to who launched."""

    HEAD = "head killed and back"
    GONE = "island gone for good"
    CUT = "island cut off and healed"
    DRAIN = "island drained"
    LAUNCHER = "launcher killed and started again"
    TWO = "two launchers"


@dataclass
class Sight:
    """An artifact's newest attempt, as storage has it `at` seconds after the run's start."""

    at: float
    artifact: str
    attempt: int
    island: str
    step: int
    done: bool


@dataclass
class Hit:
    """A fault, what the island held then, and what became of that.

    `seconds` until its next step, counted from when an island that nothing harmed had nothing else to train, which came
    `waited` seconds after the fault; None: all were busy until then, or nothing was held. `lost` steps.
    """

    cause: str
    at: float
    island: str = ""
    artifact: str = ""
    attempt: int = 0
    step: int = 0
    waited: float = 0.0
    seconds: float | None = None
    lost: int | None = None


@dataclass
class Chaos:
    """One run on three islands: who lives, what is seen on storage, and what hit whom."""

    run: Run
    network: Network
    folder: Path
    stack: ExitStack
    seconds_cut: float
    hits: list[Hit] = field(default_factory=list)
    sights: list[Sight] = field(default_factory=list)
    islands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    harmed: set[str] = field(default_factory=set)
    began: float = 0.0

    def start(self) -> None:
        """Start the islands and one launcher, and look at storage from now on."""
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        lines = ["islands:"]
        for name, machine in self.network.machines.items():
            home = self.folder / name
            sink = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
            words = machine.command("bash", "-c", ISLAND, "island", str(home))
            self.islands[name] = subprocess.Popen(words, stdout=sink, stderr=sink, cwd=ROOT, env=environment)
            self.stack.callback(self.islands[name].wait)
            self.stack.callback(self.islands[name].kill)
            lines.append(PLACEMENT.format(name=name, address=machine.address, home=home, steps=CHECKPOINT_STEPS))
        for name in self.islands:
            wait_for((self.folder / name / ".ddm/island-0/token").exists, 120)
        (self.folder / "islands.yaml").write_text("".join(lines))
        self.began = time.monotonic()
        self.launch()
        ended = threading.Event()
        thread = threading.Thread(target=self._look, args=(ended,), daemon=True)
        thread.start()
        self.stack.callback(thread.join)
        self.stack.callback(ended.set)

    def launch(self) -> None:
        """Start a launcher."""
        words = [str(BIN / "ddm"), "launch", self.run.url, "--islands", str(self.folder / "islands.yaml")]
        sink = self.stack.enter_context((self.folder / f"launcher-{len(self.launchers)}.log").open("wb"))
        self.launchers.append(subprocess.Popen(words, stdout=sink, stderr=sink, cwd=ROOT))
        self.stack.callback(self.launchers[-1].wait)
        self.stack.callback(self.launchers[-1].kill)

    def now(self) -> float:
        return time.monotonic() - self.began

    def _look(self, ended: threading.Event) -> None:
        islands: dict[tuple[Artifact, int], str] = {}
        left = [*wanted_of(self.run.config)]
        while not ended.wait(LOOK_SECONDS):
            for artifact in list(left):
                with suppress(DDMError, OSError):
                    known = status(self.run, artifact)
                    number = known.job.attempt if known.job else max(claimed(self.run.store, artifact), default=0)
                    if number and (artifact, number) not in islands:
                        claim = Attempt(self.run.store, artifact, number).claim()
                        islands[artifact, number] = str(claim.get("island"))
                    step = known.job.step if known.job and known.job.beats and known.job.phase == "training" else 0
                    done = known.state == "finished"
                    who = islands.get((artifact, number), "")
                    self.sights.append(Sight(self.now(), artifact, number, who, step, done))
                    if done:
                        left.remove(artifact)

    def trains(self) -> dict[str, Sight]:
        """What each unharmed island trains now: its artifact's newest sight, with steps."""
        newest = {sight.artifact: sight for sight in self.sights}
        return {
            sight.island: sight
            for sight in newest.values()
            if sight.step and not sight.done and sight.island not in self.harmed
        }

    def finished(self) -> bool:
        """True once all is committed."""
        newest = {sight.artifact: sight for sight in self.sights}
        return len(newest) == len(wanted_of(self.run.config)) and all(sight.done for sight in newest.values())

    def hit(self, cause: Cause, chance: random.Random) -> Hit | None:
        """Have it happen now, to an island that trains; None if none does any more."""
        if cause in (Cause.LAUNCHER, Cause.TWO):
            hit = Hit(cause.name, self.now())
            if cause is Cause.LAUNCHER:
                self.launchers[-1].kill()
                self.launchers[-1].wait()
            self.launch()
        else:
            wait_for(lambda: self.trains() or self.finished(), 600)
            if not (able := sorted(self.trains().items())):
                return None
            island, sight = chance.choice(able)
            self.harmed.add(island)
            hit = Hit(cause.name, self.now(), island, sight.artifact, sight.attempt, sight.step)
            self._harm(cause, self.network.machines[island], self.islands[island])
        self.hits.append(hit)
        return hit

    def _harm(self, cause: Cause, machine: Machine, process: subprocess.Popen[bytes]) -> None:
        if cause is Cause.GONE:
            process.kill()
        elif cause is Cause.HEAD:
            (server,) = [pid for pid in family(process.pid) if command(pid).split(" ")[0].endswith("gcs_server")]
            os.kill(server, signal.SIGKILL)
        elif cause is Cause.CUT:
            subprocess.run(["ip", "link", "set", machine.port, "down"], check=True)
            heal = threading.Timer(
                self.seconds_cut, subprocess.run, [["ip", "link", "set", machine.port, "up"]], {"check": False}
            )
            heal.start()
            self.stack.callback(heal.cancel)
        else:
            done = ddm("islands", "drain", self.run.url, machine.name)
            assert done.returncode == 0, done.stderr

    def _free_at(self, hit: Hit, end: float) -> float:
        """The moment since when, until the hit's artifact is trained again, an unharmed island had nothing else."""
        harmed = {each.island for each in self.hits if each.at < end}
        moments = []
        for island in set(NAMES) - harmed:
            other = [s.at for s in self.sights if s.island == island and s.artifact != hit.artifact and not s.done]
            moments.append(max([hit.at, *(at for at in other if at <= end)]))
        return min(moments, default=hit.at)

    def judge(self) -> None:
        """Say of each hit when its artifact's next step came, and how many steps were done again."""
        for hit in self.hits:
            later = [s for s in self.sights if s.artifact == hit.artifact and s.at > hit.at]
            first = next((s for s in later if s.done or (s.attempt > hit.attempt and s.step)), None)
            if first is None:
                continue
            hit.waited = self._free_at(hit, first.at) - hit.at
            if (seconds := first.at - hit.at - hit.waited) > LOOK_SECONDS:
                hit.seconds = seconds
            seen = max((s.step for s in later if s.attempt == hit.attempt), default=hit.step)
            again = first.attempt != hit.attempt and not first.done
            hit.lost = max(0, max(seen, hit.step) - first.step) if again else 0


def _checksums(run: Run) -> dict[str, str]:
    return checksums_of(run, wanted_of(run.config))


def base(folder: Path, steps: int) -> tuple[Path, dict[str, str]]:
    """A run whose training nobody has begun, and the checksums of the same trained alone, in a copy."""
    made, alone = folder / "base", folder / "alone"
    sets = [f"expert.train.steps={steps}", "router.train.steps=500", "partition.num_clusters=2"]
    options = [word for each in sets for word in ("--set", each)]
    for run in (made, alone):
        for words in (
            ("init", str(run), "--recipe", "digits", *options),
            ("prepare", str(run)),
            ("partition", str(run)),
        ):
            ended = ddm(*words, timeout=1200)
            assert ended.returncode == 0, ended.stderr
    ended = ddm("work", str(alone), "--island", "alone", timeout=3600)
    assert ended.returncode == 0, ended.stderr
    return made, _checksums(Run.open(str(alone)))


def chaos(seed: int, made: Path, folder: Path, args: Any, note: Callable[[str], None]) -> Chaos:
    """One run to its end."""
    chance = random.Random(seed)
    folder.mkdir()
    with ExitStack() as stack:
        net = stack.enter_context(network(NAMES))
        server = stack.enter_context(s3_server(folder / "s3.log"))
        stack.enter_context(leading_through(server, net.storage))
        run = Run.open(upload(made, f"chaos-{seed}"))
        running = Chaos(run, net, folder, stack, args.cut_seconds)
        running.start()
        wait_for(running.trains, 600, lambda: (folder / "launcher-0.log").read_text()[-2000:])
        causes = list(Cause)
        # Each run begins with another one, so that few runs have all; two islands at most are harmed.
        first = causes[seed % len(causes)]
        order = [first, *chance.sample([cause for cause in causes if cause is not first], 2)]
        for cause in order[: args.faults]:
            time.sleep(chance.uniform(1, args.every))
            if running.finished() or len(running.harmed) == len(NAMES) - 1:
                break
            if (hit := running.hit(cause, chance)) is None:
                break
            note(f"seed {seed}: {hit.at:.0f} s {cause.value} {hit.island} {hit.artifact} at step {hit.step}")
        wait_for(running.finished, 3600, lambda: (folder / "launcher-0.log").read_text()[-2000:], every=0.5)
        note(f"seed {seed}: all finished after {running.now():.0f} s")
        assert running.launchers[-1].wait(300) == 0
        running.judge()
        assert _checksums(run) == args.alone, f"seed {seed}: other bits"
    return running


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="how many, each of another seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--steps", type=int, default=10_000, help="of each expert")
    parser.add_argument("--faults", type=int, default=3, help="in a run, at most")
    parser.add_argument("--every", type=float, default=40, help="longest pause in seconds before a fault")
    parser.add_argument("--cut-seconds", type=float, default=300, help="how long an island is cut off")
    parser.add_argument("--film", type=Path, metavar="PATH", help="write what was seen of the last run here, as JSON")
    args = parser.parse_args()
    if lack := lacks():
        print(f"island_chaos.py is left out: it {lack}")
        return
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    report, hits = Report(args.device), list[Hit]()
    with tempfile.TemporaryDirectory(prefix="ddm-chaos-", dir="/var/tmp") as name:
        folder = Path(name)
        made, args.alone = base(folder, args.steps)
        for seed in range(args.seed, args.seed + args.runs):
            ran = chaos(seed, made, folder / f"{seed}", args, report.progress)
            hits += ran.hits
            for hit in ran.hits:
                report.progress(f"seed {seed}: {json.dumps(asdict(hit))}")
            if args.film:
                record = {"sights": [asdict(s) for s in ran.sights], "hits": [asdict(h) for h in ran.hits]}
                args.film.write_text(json.dumps(record))
    report.add(Claim("runs that finished with the bits of one trained alone", args.runs, "runs"))
    for cause in Cause:
        met = [hit for hit in hits if hit.cause == cause.name]
        seconds = sorted(hit.seconds for hit in met if hit.seconds is not None)
        lost = [hit.lost for hit in met if hit.lost is not None]
        report.add(Claim(f"{cause.value}: faults", len(met), ""))
        if seconds:
            high = statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
            most = MOST_SECONDS + GRACE_SECONDS
            report.add(Claim(f"{cause.value}: from an idle island to the next step, 95th percentile", high, "s", most))
            waited = max(hit.waited for hit in met)
            report.add(Claim(f"{cause.value}: longest wait for an idle island before", waited, "s"))
        if lost:
            report.add(Claim(f"{cause.value}: most steps done again", max(lost), "steps", CHECKPOINT_STEPS))
    report.finish(args.json)


if __name__ == "__main__":
    main()
