"""Owners that were frozen and wake to find that another island has taken over: when they end, and with which bits.

An expert is trained by `ddm train` on one slice of a Ray cluster. Its workers are frozen after a state, the same expert
is launched on another slice, and once that has saved a state, too, the frozen ones wake. Claims: the first command ends
with exit code 1 within 60 s, and the other one's artifact is that of a training that nothing happened to, to the bit.
"""

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from claims import Claim, Report, options

from ddm_ray.run.run import Run
from tests.train.background import Background
from tests.train.ray.site import Site
from tests.train.results import apart

# So many that the owner looks while the other one still trains.
STEPS = ["expert.train.steps=8000", "expert.train.batch=6"]
MOST_SECONDS = 60.0


def overtake(site: Site, number: int, alone: Run) -> tuple[float, float]:
    """Seconds until the owner has ended since it woke, and how far the artifact is off."""
    training = site.training(f"overtaken-{number}", 1, "patient", steps=STEPS)
    site.cluster.slice("slice-b", 1)
    try:
        training.launch()
        training.wait_for_state(1)
        training.overtake("b")
        began = time.monotonic()
        code = training.drivers[0].wait(600)
        seconds = time.monotonic() - began
        assert code == 1 and not training.finished(), training.log_tail()
        training.wait_until_finished(600)
        assert training.drivers[1].wait(120) == 0, training.log_tail()
    finally:
        training.stop()
    return seconds, apart(alone, training.run, training.artifact)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    report, seconds, off = Report(args.device), list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="ddm-overtaken-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "alone").mkdir()
        legs = {"long": {"settings": STEPS, "legs": [{"world": 1}]}}
        Background("ranks", str(folder / "alone"), json.dumps(legs)).finish()
        alone = Run.open(str(folder / "alone" / "long"))
        (folder / "site").mkdir()
        site = Site(folder / "site", stack)
        for number in range(args.rounds):
            ended, distance = overtake(site, number, alone)
            report.progress(f"{number + 1} of {args.rounds}: ended {ended:.1f} s after it woke")
            seconds.append(ended)
            off.append(distance)
    report.add(Claim("owners that were overtaken", len(seconds), ""))
    report.add(Claim("longest time until one ended", max(seconds), "s", MOST_SECONDS))
    report.add(Claim("median of it", sorted(seconds)[len(seconds) // 2], "s"))
    report.add(Claim("furthest from the bits of one trained alone", max(off), "", 0))
    report.finish(args.json)


if __name__ == "__main__":
    main()
