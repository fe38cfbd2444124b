"""The first week of a new user, as a script: messy photographs, three formats, all stages, kills, a full disk, a crowd.

Everything is done as the README says, by `ddm` alone, each command on a Ray of its own, in a home of its own, with the
recipe photos-cpu. `stages` is an undisturbed run from `init` to a served image. `formats` has the same images as
parquet and as tars. `kills` does all stages again, and kills each command with SIGKILL at seeded moments, and a
training worker, and repeats the same command. `disk` trains while no state can be written, and again with room.
`crowd` trains beside eight busy processes a core. `clock` is the recipe as it is: the waiting from images to samples.
Runs are compared by checksums: nothing may be lost, and of what is printed no line may be one that nobody can read.
"""

import hashlib
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pyarrow.parquet as pq  # noqa: E402
from claims import Claim, Report, measuring  # noqa: E402
from messy_photos import CLASSES, Messy, write_messy, write_parquet, write_tars  # noqa: E402
from terminal import Terminal, by_name, kill, killed_after, one_by_one, with_a_trainer  # noqa: E402

from ddm_ray.jobs.attempts import claimed  # noqa: E402
from ddm_ray.run.graph import CENTROIDS, PARTITION, ROUTER, ROWS, evaluation, shard  # noqa: E402
from ddm_ray.run.info import RowsInfo  # noqa: E402
from ddm_ray.run.run import Run  # noqa: E402
from tests.processes import crowd  # noqa: E402
from tests.train.results import checksums_of  # noqa: E402

MEASURES = ("stages", "formats", "kills", "disk", "crowd", "clock")
SIZES = {"images": 2000, "steps": 600, "kills": 3, "seed": 0}
QUICK = {"images": 400, "steps": 60, "kills": 1}
EACH_CORE = 8
INSTALL_MINUTES, MOST_MINUTES = 3, 20
REFUSED_BYTES = 200_000
"""Size from which on files are refused, as on a full disk: states are larger, logs and signs of life are not."""
STAGES = {
    "prepare": ("prepare", "{run}"),
    "partition": ("partition", "{run}"),
    "train": ("train", "{run}", "all"),
    "sample": ("sample", "{run}", "--per-class", "4", "-o", "{run}.png"),
    "evaluate": ("evaluate", "{run}"),
    "export": ("export", "{run}", "{run}-exported", "--overwrite"),
}
"""The commands of a run, in their order."""


@dataclass
class Week:
    """What was made of the photographs, where, and by which settings."""

    terminal: Terminal
    messy: Messy
    args: Namespace
    report: Report
    chance: random.Random
    seconds: dict[str, float] = field(default_factory=dict)

    def settings(self, source: str) -> list[str]:
        """Options of `init` for a short run."""
        steps, names = self.args.steps, ", ".join(f'"{name}"' for name in CLASSES)
        settings = [f"data.source={source}", f"data.class_names=[{names}]", "evaluate.num_samples=64"]
        settings += [
            f"{model}.train.{name}" for model in ("expert", "router") for name in (f"steps={steps}", "warmup_steps=10")
        ]
        return ["--recipe", "photos-cpu", *(word for each in settings for word in ("--set", each))]

    def words(self, stage: str, run: str) -> list[str]:
        return [word.replace("{run}", run) for word in STAGES[stage]]

    def open(self, run: str) -> Run:
        return Run.open(str(self.terminal.folder / run))

    def copy(self, run: str, name: str) -> str:
        """A copy of a run's folder."""
        shutil.copytree(self.terminal.folder / run, self.terminal.folder / name)
        return name

    # --- what became of a run

    def bits(self, run: str) -> dict[str, str]:
        """Checksums of all that a run and its commands left which has to be the same each time, by name."""
        opened, folder = self.open(run), self.terminal.folder
        sums = {}
        for artifact in (ROWS, CENTROIDS, PARTITION, *(shard(k) for k in range(len(opened.experts)))):
            sums |= {f"{artifact}/{name}": file.sha256 for name, file in opened.require(artifact).files.items()}
        sums |= checksums_of(opened, [*opened.experts, ROUTER])
        if finished := opened.manifest(evaluation("default")):
            samples = {name: file for name, file in finished.files.items() if name.endswith(".safetensors")}
            sums |= {f"eval/{name}": file.sha256 for name, file in samples.items() if not name.startswith("_report")}
            sums["eval/grid.png"] = finished.files["grid.png"].sha256
        for path in (folder / f"{run}.png", folder / f"{run}-served.png"):
            if path.exists():
                sums[path.name.removeprefix(run)] = checksum(path)
        exported = folder / f"{run}-exported"
        return sums | {
            str(path.relative_to(exported)): checksum(path) for path in exported.rglob("*") if path.is_file()
        }

    def serve(self, run: str, killed: bool = False) -> float:
        """Serve a run, and have one image painted; its seconds. `killed`: the first server is, once it serves."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        words, began = ("serve", run, "--port", port), time.monotonic()
        for last in (False, True) if killed else (True,):
            process, log = self.terminal.start(*words)
            try:
                while process.poll() is None and not answers(port):
                    time.sleep(0.2)
                if last and process.poll() is None:
                    client = [sys.executable, str(ROOT / "serving/client.py"), CLASSES[0], "--seed", "1"]
                    client += ["--url", f"http://127.0.0.1:{port}", "--out", f"{run}-served.png"]
                    subprocess.run(client, cwd=self.terminal.folder, check=True, timeout=300, stdout=subprocess.DEVNULL)
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(60)
            finally:
                process.kill()
                process.wait()
            self.terminal.record(words, process.returncode, log, time.monotonic() - began)
        return time.monotonic() - began

    # --- measures

    def stages(self, run: str = "undisturbed") -> None:
        """All stages of a run, from `init` to a served image, undisturbed; a copy of what there was before training."""
        self.seconds["init"] = self.terminal.succeed("init", run, *self.settings("photos")).seconds
        for stage in STAGES:
            self.seconds[stage] = self.terminal.succeed(*self.words(stage, run)).seconds
            if stage == "partition":
                self.copy(run, "untrained")
        self.seconds["serve"] = self.serve(run)
        for stage, seconds in self.seconds.items():
            self.report.add(Claim(f"{stage}", seconds, "s"))
        rows = self.rows(run)
        lost = Counter(Path(name).as_posix() for name in self.messy.good) - Counter(rows["id"])
        info = RowsInfo.of(self.open(run).require(ROWS))
        self.claim_none(f"images lost, of {len(self.messy.good)}", lost.total())
        self.claim_none("images without a reason for their rejection", len(self.messy.broken) - info.rejected)

    def rows(self, run: str) -> dict[str, list[object]]:
        """Ids, labels and pixels of a run's rows."""
        opened = self.open(run)
        files = sorted(name for name in opened.require(ROWS).files if not name.startswith("_"))
        tables = [pq.read_table(f"{opened.url}/{ROWS}/{name}") for name in files]
        return {
            column: [value for table in tables for value in table[column].to_pylist()]
            for column in ("id", "label", "data")
        }

    def formats(self) -> None:
        """The same images as parquet and as tars: the same rows, but for their ids and splits."""
        like = Counter(zip(*(self.rows("undisturbed")[column] for column in ("label", "data")), strict=True))
        for name, write in (("parquet", write_parquet), ("tars", write_tars)):
            write(self.messy, self.terminal.folder / name)
            self.terminal.succeed("init", f"of-{name}", *self.settings(name))
            self.terminal.succeed(*self.words("prepare", f"of-{name}"))
            rows = self.rows(f"of-{name}")
            other = Counter(zip(rows["label"], rows["data"], strict=True))
            self.claim_none(f"{name}: rows that differ from the folder's", ((like - other) + (other - like)).total())

    def kills(self, run: str = "killed") -> None:
        """All stages again, each killed at seeded moments and repeated; the same bits as undisturbed."""
        hits, workers = 0, list[int]()

        def kill_worker(pid: int) -> None:
            workers.append(pid)
            kill(pid)

        self.terminal.succeed("init", run, *self.settings("photos"))
        for stage in STAGES:
            for number in range(self.args.kills):
                harm = [killed_after(self.chance.uniform(0.05, 0.95) * self.seconds[stage])]
                if stage == "train" and number == 0:
                    # One of its workers before: the command itself begins the next attempt.
                    harm.insert(
                        0, with_a_trainer(kill_worker, 0.3 * self.chance.random() * self.seconds[stage], self.chance)
                    )
                hits += self.terminal.ddm(*self.words(stage, run), meanwhile=one_by_one(harm)).status < 0
            self.terminal.succeed(*self.words(stage, run))
        self.serve(run, killed=True)
        self.report.add(Claim("commands killed", hits, ""))
        self.report.add(Claim("training workers killed", len(workers), ""))
        before, after = self.bits("undisturbed"), self.bits(run)
        other = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        self.report.progress(f"{len(before)} files compared" + "".join(f"\n  other: {name}" for name in other))
        self.claim_none(f"files with other bits after kills, of {len(before)}", len(other))

    def disk(self) -> None:
        """Training where no state can be written: it ends, says why in one line, and goes on once there is room."""
        run, island = self.copy("untrained", "full"), self.terminal.folder / "islands.yaml"
        island.write_text("islands: {mine: {checkpoint_steps: 4}}\n")
        words = ("train", run, "expert", "0", "--islands", str(island))
        full = self.terminal.ddm(*words, meanwhile=with_a_trainer(refuse, 0, self.chance))
        last = full.text.strip().splitlines()[-2:]
        is_named = full.status == 1 and any("states can't be saved" in line for line in last)
        if not is_named:
            self.report.progress(full.text[-2000:])
        self.claim_none("full disks that a training didn't end for and tell of", not is_named)
        self.claim_none("and not in status", "states can't be saved" not in self.terminal.ddm("status", run).text)
        self.terminal.succeed(*words)
        self.claim_none("experts with other bits after a full disk", self.other_weights(run, 1))

    def crowd(self) -> None:
        """Training beside eight busy processes a core: slower, and nothing else."""
        run, number = self.copy("untrained", "crowded"), EACH_CORE * len(os.sched_getaffinity(0))
        with crowd(number):
            done = self.terminal.ddm(*self.words("train", run))
        opened = self.open(run)
        networks = [*opened.experts, ROUTER]
        self.claim_none(f"trainings that failed beside {number} busy processes", done.status != 0)
        attempts = max(len(claimed(opened.store, network)) for network in networks)
        self.report.add(Claim("attempts of a training beside them, most", attempts, "", target=1))
        self.claim_none("networks with other bits beside them", self.other_weights(run, len(networks)))
        self.report.add(Claim("training beside them", done.seconds / self.seconds["train"], "x"))

    def other_weights(self, run: str, count: int) -> int:
        """How many of the first networks aren't the undisturbed run's, to the bit."""
        opened, quiet = self.open(run), self.open("undisturbed")
        networks = [*quiet.experts, ROUTER][:count]
        right = checksums_of(quiet, networks)
        return sum(not opened.finished(each) or checksums_of(opened, [each])[each] != right[each] for each in networks)

    def clock(self) -> None:
        """The recipe as it is, to samples: what a newcomer waits for after the installation."""
        short, run = self.settings("photos")[2:] if self.args.quick else ["--set", "data.source=photos"], "clock"
        taken = {"init": self.terminal.succeed("init", run, "--recipe", "photos-cpu", *short).seconds}
        for stage in ("prepare", "partition", "train", "sample"):
            taken[stage] = self.terminal.succeed(*self.words(stage, run)).seconds
        for stage, seconds in taken.items():
            self.report.add(Claim(f"photos-cpu: {stage}", seconds, "s"))
        most = None if self.args.quick else MOST_MINUTES - INSTALL_MINUTES
        self.report.add(Claim("photos-cpu: from photographs to samples", sum(taken.values()) / 60, "minutes", most))

    def claim_none(self, name: str, count: int) -> None:
        self.report.add(Claim(name, float(count), "", target=0))


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def answers(port: str) -> bool:
    """Whether a server that is ready listens there."""
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def refuse(pid: int) -> None:
    """Have the operating system refuse a process files of a state's size."""
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (REFUSED_BYTES, REFUSED_BYTES))


def main() -> None:
    """Live through the week, and write what became of it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # commands that run end, too
    args = measuring("The first week of a new user, as a script.", MEASURES, SIZES, QUICK)
    report = Report()
    with ExitStack() as stack:
        folder = Path(args.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="ddm-first-week-")))
        terminal = Terminal(folder, Path(sys.executable).parent, ROOT, report.progress)
        messy = write_messy(folder / "photos", args.images, args.seed)
        week = Week(terminal, messy, args, report, random.Random(args.seed))
        needed = {"stages", *args.measure} if {*args.measure} - {"clock"} else {*args.measure}
        for measure in MEASURES:
            if measure in needed:
                getattr(week, measure)()
        for name, count in by_name(terminal.typed).items():
            week.claim_none(f"{name} in what {len(terminal.typed)} commands printed", count)
        surprised = sum(bool(done.surprises()) for done in terminal.typed)
        week.claim_none(f"commands with a surprise, of {len(terminal.typed)}", surprised)
        week.claim_none("processes left a minute after all", len(terminal.left_after(60)))
    report.finish(args.json)


if __name__ == "__main__":
    main()
