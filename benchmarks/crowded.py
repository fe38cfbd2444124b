"""Training on a crowded machine: real Ray, Ray Train and DeepSpeed beside eight busy processes a core.

An expert, the router and the monolith of `digits` are trained by `ddm train RUN all` while each core has eight
processes more that want it. Load only slows: claims are that no attempt ends, no Ray has to be started by hand, and
that the weights are those of a quiet machine, to the bit.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from claims import Claim, Report, options  # noqa: E402

from ddm_ray.jobs.attempts import claimed  # noqa: E402
from ddm_ray.run.graph import ROUTER  # noqa: E402
from ddm_ray.run.run import Run  # noqa: E402
from tests.conftest import ddm  # noqa: E402
from tests.processes import crowd  # noqa: E402
from tests.train.results import checksums_of  # noqa: E402

EACH_CORE = 8
LONGEST = 3600.0


def trained(folder: Path, steps: int, processes: int) -> tuple[Run, float, int]:
    """A run of two experts and a router, trained beside so many processes; its seconds, and commands that failed."""
    url, failed = str(folder), 0
    settings = ["partition.num_clusters=2", f"expert.train.steps={steps}", f"router.train.steps={steps}"]
    options = [word for each in settings for word in ("--set", each)]
    for words in (["init", url, "--recipe", "digits", *options], ["prepare", url], ["partition", url]):
        if (made := ddm(*words, timeout=600)).returncode:
            raise SystemExit(f"ddm {words[0]}: {made.stderr[-2000:]}")
    began = time.monotonic()
    with crowd(processes):
        done = ddm("train", url, "all", timeout=LONGEST)
    if done.returncode:
        failed = 1
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return Run.open(url), time.monotonic() - began, failed


def main() -> None:
    """Train on a quiet machine and on a crowded one, and compare."""
    parser = options("Training beside eight busy processes a core.")
    parser.add_argument("--steps", type=int, help="of each training; 1200, with --quick 300")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    report, steps = Report(), args.steps or (300 if args.quick else 1200)
    number = EACH_CORE * len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="ddm-crowded-") as name:
        quiet, alone, _ = trained(Path(name, "quiet"), steps, 0)
        crowded, beside, failed = trained(Path(name, "crowded"), steps, number)
        artifacts = [*crowded.experts, ROUTER]
        attempts = max(len(claimed(crowded.store, artifact)) for artifact in artifacts)
        other = len(artifacts)
        if not failed:
            pairs = zip(checksums_of(quiet, artifacts).values(), checksums_of(crowded, artifacts).values(), strict=True)
            other = sum(one != another for one, another in pairs)
    report.add(Claim(f"commands that failed beside {number} busy processes", failed, "", target=0))
    report.add(Claim("attempts of a training, most", attempts, "", target=1))
    report.add(Claim("trainings with other bits than on a quiet machine", other, "", target=0))
    report.add(Claim("time over that on a quiet machine", beside / alone, "x"))
    report.finish(args.json)


if __name__ == "__main__":
    main()
