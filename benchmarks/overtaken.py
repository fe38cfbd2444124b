"""Owners that were frozen and wake to find that another island has taken over: when they end, and with which bits.

An expert is trained by `ddm train` on one slice of a Ray cluster. Its workers are frozen after a state, the same expert
is launched on another slice, and once that has saved a state, too, the frozen ones wake. Claims: the first command ends
with exit code 1 within 60 s, the other one's artifact is that of a training that nothing happened to, to the bit, and
there is one manifest.
"""

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from claims import Claim, Report, options

from ddm_ray.storage.manifest import NAME
from ddm_ray.storage.run import Run
from tests.processes import family
from tests.train.background import Background
from tests.train.ray.site import Site
from tests.train.results import apart

# So many that the owner looks while the other one still trains.
STEPS = ["expert.train.steps=8000", "expert.train.global_batch=12"]
MOST_SECONDS = 60.0


def overtake(site: Site, number: int, alone: Run) -> tuple[float, float, int]:
    """Seconds until the owner has ended since it woke, how far the artifact is off, and manifests."""
    training = site.training(f"overtaken-{number}", 1, "patient", steps=STEPS)
    site.cluster.slice("slice-b", 1)
    try:
        training.launch()
        training.wait_for_state(1)
        frozen = [pid for worker in training.workers() for pid in reversed(family(worker))]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        training.launch("b")
        training.wait_for_state(2)
        began = time.monotonic()
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        code = training.drivers[0].wait(600)
        seconds = time.monotonic() - began
        assert code == 1 and not training.finished(), training.log_tail()
        training.wait_until_finished(600)
        assert training.drivers[1].wait(120) == 0, training.log_tail()
    finally:
        training.stop()
    manifests = len(list((Path(training.run.url) / training.artifact).glob(NAME)))
    return seconds, apart(alone, training.run, training.artifact), manifests


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    report, seconds, off, manifests = Report(args.device), list[float](), list[float](), list[int]()
    with tempfile.TemporaryDirectory(prefix="ddm-overtaken-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "alone").mkdir()
        legs = {"long": {"settings": STEPS, "legs": [{"world": 1}]}}
        Background("rank_faults", str(folder / "alone"), json.dumps(legs)).finish()
        alone = Run.open(str(folder / "alone" / "long"))
        (folder / "site").mkdir()
        site = Site(folder / "site", stack)
        for number in range(args.rounds):
            ended, distance, count = overtake(site, number, alone)
            report.progress(f"{number + 1} of {args.rounds}: ended {ended:.1f} s after it woke")
            seconds.append(ended)
            off.append(distance)
            manifests.append(count)
    report.add(Claim("owners that were overtaken", len(seconds), ""))
    report.add(Claim("longest time until one ended", max(seconds), "s", MOST_SECONDS))
    report.add(Claim("median of it", sorted(seconds)[len(seconds) // 2], "s"))
    report.add(Claim("furthest from the bits of one trained alone", max(off), "", 0))
    report.add(Claim("manifests besides one", max(abs(count - 1) for count in manifests), "", 0))
    report.finish(args.json)


if __name__ == "__main__":
    main()
