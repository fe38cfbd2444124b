"""Random faults on a training of two experts, each on a slice of one Ray cluster, and what they cost.

Expert 0 has two workers, expert 1 one. First expert 1 alone loses all that it has, a number of times. Then one of them
meets a fault of tests/faults.py every so often, or both lose the head. When the time is over and there were enough of
them, they finish undisturbed, and are compared, bit by bit, with experts that met no fault.

Lost is the time from a fault to its expert's next step, that of the steps which are then done again, and what
checkpoints hold training up; all other time is useful. Goodput at other times between faults follows from what was
measured here. A second launch throws nobody back; its worker is killed once it has taken a step.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from claims import Claim, Report, options  # noqa: E402
from goodput import Costs, Hit, fault_seconds  # noqa: E402

from ddm_ray.run.graph import expert  # noqa: E402
from ddm_ray.run.run import Run  # noqa: E402
from tests.conftest import wait_for  # noqa: E402
from tests.faults import Fault, Training, inject  # noqa: E402
from tests.random_run import make_data  # noqa: E402
from tests.train.ray.nodes import Nodes, ray_nodes  # noqa: E402
from tests.train.results import apart, final_weights  # noqa: E402

CHECKPOINT_STEPS = 100
BATCH = 32
WORKERS = (2, 1)
ISLAND = """
  {name}:
    workers: {workers}
    resources_per_worker: {{CPU: 1, slice-{name}: 1}}
    checkpoint_steps: {steps}
    hang_seconds: 3
"""
# Of the time that there are faults, what undisturbed training of all steps would take, at the slower expert's pace:
# longer than all ends of the other one, which has few steps behind it then.
SHARE = 0.5
# Seconds until the next step, for 95 faults of 100.
MOST_SECONDS = {Fault.WORKER_KILLED: 15.0, Fault.NODE_KILLED: 30.0, Fault.ALL_KILLED: 60.0, Fault.HEAD_KILLED: 60.0}
PROBE_STEPS = 400
PROBE_CHECKPOINT_STEPS = 4
"""Steps between checkpoints where their cost is measured."""


def settings(steps: int) -> list[str]:
    return [f"expert.train.steps={steps}", f"expert.train.batch={BATCH // 2}"]


def undisturbed(folder: Path, steps: int, legs: list[dict]) -> list[Run]:
    """Train without Ray and faults, all legs side by side; each in a run of its own below the folder."""
    folder.mkdir()
    started = []
    for number, leg in enumerate(legs):
        case = {f"{number}": {"settings": settings(steps), "legs": [leg]}}
        command = [sys.executable, "-m", "tests.train.ranks", str(folder), json.dumps(case)]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    ended = [process.wait() for process in started]
    if any(ended):
        raise SystemExit("training without faults failed")
    return [Run.open(str(folder / f"{number}")) for number in range(len(legs))]


def pair(**placement: int) -> list[dict]:
    """Both experts, as many ranks as they have workers."""
    return [
        {"world": world, "artifact": expert(index), "seconds": 10**6, **placement}
        for index, world in enumerate(WORKERS)
    ]


def step_seconds(run: Run, artifact: str) -> float:
    info = run.require(artifact).info
    return info["seconds"] / info["step"]


@dataclass
class Soak:
    """The cluster as it is now, both trainings, and what hit them."""

    folder: Path
    chance: random.Random
    stack: ExitStack
    report: Report
    trainings: list[Training] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    ended: list[float] = field(default_factory=lambda: [0.0, 0.0])
    began: float = 0.0

    def cluster(self) -> Nodes:
        return self.stack.enter_context(ray_nodes())

    def begin(self, run: Run) -> None:
        """Launch both; the clock starts with the later one's first step."""
        islands = self.folder / "islands.yaml"
        named = zip("ab", WORKERS, strict=True)
        each = [ISLAND.format(name=name, workers=workers, steps=CHECKPOINT_STEPS) for name, workers in named]
        islands.write_text("islands:" + "".join(each))
        cluster = self.cluster()
        for index, name in enumerate("ab"):
            training = Training(
                run, index, cluster, islands, name, f"slice-{name}", self.folder / f"{name}.log", [], room=2
            )
            self.stack.callback(training.stop)
            self.trainings.append(training)
        self.launch_all()
        for training in self.trainings:
            training.wait_for_step((0, 0))
        self.began = time.monotonic()

    def launch_all(self) -> None:
        for training, nodes in zip(self.trainings, WORKERS, strict=True):
            for _ in range(nodes):
                training.add_node()
            training.launch()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def hit(self, fault: Fault, target: Training) -> None:
        """One fault, and what came of it."""
        other = self.trainings[1 - target.index]
        place, others, beside, began = target.place(), other.attempts()[-1], not other.finished(), self.elapsed
        if fault is Fault.HEAD_KILLED:
            elsewhere = other.place()
            self.lose_head()
            other.wait_for_step(elsewhere, 300)
        else:
            inject(fault, target, self.chance)
        if fault is Fault.SECOND_LAUNCH:
            end_second_launch(target)
            until, lost = 0.0, 0
        else:
            target.wait_for_step(place, 300)
            until = self.elapsed - began
            lost = max(0, place[1] - target.beat().get("first", 0))
        went_on = other.attempts()[-1] == others
        self.hits.append(Hit(fault.name, target.artifact, began, until, lost, beside, went_on))
        self.report.progress(
            f"{began:6.0f} s  {target.artifact} at step {place[1]:>6}  {fault.name:<15} next step after {until:5.1f} s,"
            f" {lost:>4} steps again{'' if went_on or fault is Fault.HEAD_KILLED else ', THE OTHER NOTICED'}"
        )

    def lose_head(self) -> None:
        """The head goes, and nodes and drivers with it; all that is left is storage."""
        old = self.trainings[0].cluster
        old.nodes[0].kill()
        for training in self.trainings:
            training.stop()
        for node in old.nodes[1:]:
            if node.process.poll() is None:
                node.kill()
        cluster = self.cluster()
        for training in self.trainings:
            training.cluster = cluster
            training.nodes.clear()
            training.drivers.clear()
        self.launch_all()

    def go_on(self, minutes: float, every: float, kills: int, faults: int) -> None:
        """So many faults, and until the time is over, or all is done; the first `kills` of them ends of expert 1."""
        due = self.chance.uniform(0, 2 * every)
        while self.elapsed < 60 * minutes or len(self.hits) < faults:
            if not (left := [each for each in self.trainings if not each.finished()]):
                return
            for training in left:
                self.ended[training.index] = self.elapsed
            if self.elapsed < due:
                time.sleep(0.1)
                continue
            if len(self.hits) < kills:
                self.hit(Fault.ALL_KILLED, self.trainings[1])
            else:
                self.hit(self.chance.choice(list(Fault)), self.chance.choice(left))
            due = self.elapsed + self.chance.uniform(0, 2 * every)


def end_second_launch(target: Training) -> None:
    """Wait until the second launch's worker has taken a step, or finds no place; then it is given up.

    Returns when its workers are gone, lest the next fault hit one of them.
    """
    second, number = target.drivers.pop(), target.attempts()[-1]
    with suppress(AssertionError):
        target.wait_for_step((number, 0), 60)
    os.killpg(second.pid, signal.SIGKILL)
    second.wait()
    most = WORKERS[target.index]
    wait_for(lambda: sum(len(node.trainers()) for node in target.nodes) <= most, 60, target.log_tail)


def checkpoint_seconds(folder: Path, repeats: int = 3) -> tuple[float, float]:
    """What training waits for a checkpoint, its spread: time of trainings with many less that of those with none."""
    estimates = []
    for repeat in range(repeats):
        each = []
        for every in (PROBE_CHECKPOINT_STEPS, PROBE_STEPS):
            legs = [{"world": 1, "artifact": expert(0), "checkpoint_steps": every}]
            (run,) = undisturbed(folder / f"probe-{repeat}-{every}", PROBE_STEPS, legs)
            each.append(run.require(expert(0)).info["seconds"])
        estimates.append((each[0] - each[1]) / (PROBE_STEPS // PROBE_CHECKPOINT_STEPS - 1))
    return max(0.0, statistics.median(estimates)), max(estimates) - min(estimates)


def soak(args: argparse.Namespace, folder: Path, report: Report) -> None:
    chance = random.Random(args.seed)
    probes = undisturbed(folder / "probe", PROBE_STEPS, pair(checkpoint_steps=CHECKPOINT_STEPS))
    slowest = max(step_seconds(run, expert(index)) for index, run in enumerate(probes))
    steps = max(PROBE_STEPS, int(60 * args.minutes * SHARE / slowest))
    report.progress(f"seed {args.seed}, {steps} steps, {slowest * 1000:.1f} ms each")
    checkpoint, spread = checkpoint_seconds(folder)
    report.progress(f"a checkpoint holds training up {checkpoint * 1000:.2f} ms, spread {spread * 1000:.2f} ms")
    run = make_data(str(folder / "run"), settings=tuple(settings(steps)))
    with ExitStack() as stack:
        soaked = Soak(folder, chance, stack, report)
        soaked.begin(run)
        soaked.go_on(args.minutes, args.every, args.kills, args.faults)
        for training in soaked.trainings:
            training.wait_until_finished(120 * args.minutes + 600)
            training.wait_for_drivers()
    if args.hits:
        args.hits.write_text(json.dumps([asdict(hit) for hit in soaked.hits], indent=1))
    report.progress("the same without faults")
    quiet = undisturbed(folder / "quiet", steps, pair(checkpoint_steps=CHECKPOINT_STEPS))
    steps_take = [step_seconds(run, expert(index)) for index, run in enumerate(probes)]
    tell(report, soaked, quiet, checkpoint, steps_take, args.kills)


def tell(report: Report, soaked: Soak, quiet: list[Run], checkpoint: float, step: list[float], kills: int) -> None:
    """The claims, of what was seen, of undisturbed runs, and of seconds of a checkpoint and of each expert's step.

    The first `kills` hits are ends of expert 1, for a claim of their own.
    """
    hits = soaked.hits
    report.add(Claim("faults", len(hits), ""))
    thrown = [hit for hit in hits if hit.fault != Fault.SECOND_LAUNCH.name]
    for fault in Fault:
        if of := [hit for hit in hits if hit.fault == fault.name]:
            until = [hit.until_step for hit in of]
            slow = statistics.quantiles(until, n=20, method="inclusive")[-1] if len(until) > 1 else until[0]
            name = f"{fault.name}, {len(of)} times: until the next step"
            report.add(Claim(f"{name}, median", statistics.median(until), "s"))
            report.add(Claim(f"{name}, 95 %", slow, "s", MOST_SECONDS.get(fault)))
    report.add(
        Claim("steps done again", statistics.median(hit.lost_steps for hit in thrown), "steps", CHECKPOINT_STEPS)
    )
    for index, training in enumerate(soaked.trainings):
        far = apart(quiet[index], training.run, training.artifact)
        report.add(Claim(f"{training.artifact}: from an undisturbed run", far, "", 0.0))
        report.add(
            Claim(
                f"{training.artifact}: final weights published",
                len(final_weights(training.run, training.artifact)),
                "times",
                1,
            )
        )
    # What meets nobody isn't noticed.
    aimed = [hit for hit in hits if hit.expert == expert(1) and hit.fault != Fault.HEAD_KILLED.name and hit.beside]
    report.add(Claim("faults of expert 1 alone, while expert 0 trained", len(aimed), ""))
    ends = sum(hit.fault == Fault.ALL_KILLED.name for hit in aimed)
    report.add(Claim("of these ends of all that expert 1 has", ends, ""))
    report.add(Claim("of these expert 0 noticed", sum(not hit.other_went_on for hit in aimed), "", 0))
    each = statistics.fmean(step)
    report.add(Claim("a fault throws back by", fault_seconds(thrown, each), "s"))
    for index, training in enumerate(soaked.trainings):
        # Losing the head costs nothing any more once it is done.
        elapsed = soaked.ended[index]
        own = [hit for hit in thrown if hit.expert == training.artifact or hit.fault == Fault.HEAD_KILLED.name]
        own = [hit for hit in own if hit.at <= elapsed]
        if own:
            goodput(report, f"{training.artifact}: time lost", own, elapsed / len(own), step[index], checkpoint)
    # As many of each kind as chance had it.
    mixed = [hit for hit in hits[kills:] if hit in thrown] or thrown
    report.add(Claim("a fault but the first ends throws back by", fault_seconds(mixed, each), "s"))
    for name, of in (("all", thrown), ("all but the first ends", mixed)):
        for seconds, target in ((120, 0.20), (600, 0.07)):
            goodput(report, f"time lost, computed from {name}", of, seconds, each, checkpoint, target)


def goodput(
    report: Report,
    name: str,
    hits: list[Hit],
    between: float,
    step: float,
    checkpoint: float,
    target: float | None = None,
) -> None:
    """Claims about the time that is lost with a fault like these every so many seconds."""
    costs = Costs(step, checkpoint, CHECKPOINT_STEPS * step, fault_seconds(hits, 0.0))
    share = fault_seconds(hits, step) / between + checkpoint / costs.interval
    report.add(Claim(f"{name}, a fault every {between:.0f} s", share, "share", target))
    if best := costs.best_goodput(between):  # none where recovering takes as long
        below = 1 - (1 - share) / best
        report.add(Claim(f"{name}, a fault every {between:.0f} s: below the Young/Daly optimum", below, "share", 0.05))


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long there are faults")
    parser.add_argument("--faults", type=int, default=60, help="how many there are at least")
    parser.add_argument("--kills", type=int, default=20, help="how often expert 1 loses all, before other faults")
    parser.add_argument("--every", type=float, default=4, help="mean seconds from a step after a fault to the next one")
    parser.add_argument("--seed", type=int, default=0, help="of faults, targets and times")
    parser.add_argument("--hits", type=Path, metavar="PATH", help="write what each fault did here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    report = Report(args.device)
    with tempfile.TemporaryDirectory(prefix="ddm-soak-", dir="/tmp") as folder:
        soak(args, Path(folder), report)
    report.finish(args.json)


if __name__ == "__main__":
    main()
