"""Requests to storage, counted by a proxy before a real S3 server (moto's), and what they cost at S3's prices.

Look: a run whose experts have left what training leaves on storage, some of them at work, some finished, and whose
islands keep their presence there. What a first look asks for, one that lists, one that only reads heartbeats; and `ddm
watch` as it looks by default, on a clock that this script moves, once nothing has changed for ten minutes.
Train: `ddm train` of one expert on a private Ray, once it has trained for so long: requests a second of all processes
together, and the bytes of curves.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from claims import Claim, Report, measuring  # noqa: E402

from ddm_ray.islands.list_workers import WorkerTable  # noqa: E402
from ddm_ray.islands.worker_heartbeat import WorkerHeartbeat  # noqa: E402
from ddm_ray.jobs.attempts import Attempt, heartbeat  # noqa: E402
from ddm_ray.jobs.observer import LIST_SECONDS, Observer  # noqa: E402
from ddm_ray.jobs.status import survey  # noqa: E402
from ddm_ray.run.graph import expert  # noqa: E402
from ddm_ray.run.run import Run  # noqa: E402
from ddm_ray.watch.loop import PAID_EVERY_SECONDS  # noqa: E402
from tests.conftest import BIN, wait_for  # noqa: E402
from tests.data.s3 import BUCKET, s3_server, upload  # noqa: E402
from tests.jobs.attempts import beat  # noqa: E402
from tests.jobs.fleet import ATTEMPTS, make_fleet  # noqa: E402
from tests.random_run import make_data  # noqa: E402
from tests.s3_wire import Wire, leading_through  # noqa: E402

MEASURES = ("look", "train")
SIZES = {"experts": 256, "training": 64, "finished": 64, "islands": 8, "settle": 300, "seconds": 120}
QUICK = {"experts": 16, "training": 4, "finished": 4, "islands": 2, "settle": 60, "seconds": 30}
# What issue and design ask for: of a look, of a day of `ddm watch` in dollars, of `ddm train` a second, of curves.
MOST_LIST, MOST_DOLLARS, MOST_LIST_RATE, MOST_RATE, MOST_CURVES_GB = 15, 1.0, 0.1, 1.5, 0.5
# Dollars a request of S3's standard class; the others are free.
PRICES = {"LIST": 5e-6, "PUT": 5e-6, "POST": 5e-6, "GET": 0.4e-6, "HEAD": 0.4e-6}
DAY = 86400
CALM_SECONDS, WATCHED_SECONDS = 600.0, 600.0


def dollars(counts: Counter[str]) -> float:
    """Price of requests by kind."""
    return sum(PRICES.get(kind, 0.0) * number for kind, number in counts.items())


def measure_look(args: argparse.Namespace, server: str, report: Report) -> None:
    """What looks at a run of many experts ask for."""
    made = make_fleet(f"s3://{BUCKET}/fleet", args.experts, args.training, args.finished)
    at_work = made.experts[args.finished : args.finished + args.training]
    islands = [WorkerHeartbeat(made.store, f"island-{number}") for number in range(args.islands)]
    name = f"{args.experts} experts, {args.training} train, {args.islands} islands"
    with leading_through(server) as wire:
        run = Run.open(made.url)
        observer, calls, beats = Observer(run, partial(survey, run)), WorkerTable(run.store, LIST_SECONDS), 1

        def look(now: float, *looks: Callable[[float], object]) -> Counter[str]:
            nonlocal beats
            beats += 1
            for artifact in at_work:  # not through the proxy
                beat(Attempt(made.store, artifact, ATTEMPTS), beats, beats)
            for island in islands:
                island.update(waits=f"{beats}")
            since = len(wire.requests)
            for each in looks or (observer.look, calls.rows):
                each(now)
            return wire.counts(since)

        first = look(0.0, observer.look)
        listing = look(CALM_SECONDS, observer.look)
        called = look(CALM_SECONDS, calls.rows)
        reading = look(CALM_SECONDS + PAID_EVERY_SECONDS)
        ticks = int(WATCHED_SECONDS / PAID_EVERY_SECONDS)
        watched = sum((look(CALM_SECONDS + tick * PAID_EVERY_SECONDS) for tick in range(2, ticks + 2)), Counter[str]())
    for kind in ("LIST", "GET"):
        report.add(Claim(f"{name}: first look, {kind}", first[kind], "requests"))
    report.add(Claim(f"{name}: a look that lists, LIST", listing["LIST"], "requests", MOST_LIST))
    report.add(Claim(f"{name}: a look that lists, all else", others(listing), "requests", args.training))
    report.add(Claim(f"{name}: a look at islands", called.total(), "requests", 1 + args.islands))
    report.add(Claim(f"{name}: a look in between", reading.total(), "requests", args.training))
    price = dollars(watched) * DAY / WATCHED_SECONDS
    report.add(Claim(f"{name}: ddm watch each {PAID_EVERY_SECONDS:g} s", price, "$ a day", MOST_DOLLARS))


def others(counts: Counter[str]) -> int:
    """Number of requests that list nothing."""
    return counts.total() - counts["LIST"]


def measure_train(args: argparse.Namespace, folder: Path, server: str, report: Report) -> None:
    """What `ddm train` asks for once it has settled."""
    endless = ("expert.train.steps=10000000", "expert.train.batch=6")
    url = upload(Path(make_data(str(folder / "run"), settings=endless).url), "train")
    log = folder / "log"
    with leading_through(server) as wire, log.open("wb") as sink:
        command = [str(BIN / "ddm"), "train", url, "expert", "0"]
        training = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
        try:
            store = Run.open(url).store
            wait_for(lambda: (heartbeat(store, expert(0)) or {}).get("phase") == "training", 180, log.read_text, 1.0)
            report.progress(f"it trains; waiting {args.settle} s")
            time.sleep(args.settle)
            since, began = len(wire.requests), time.monotonic()
            time.sleep(args.seconds)
            tell_train(wire, since, time.monotonic() - began, report)
        finally:
            end(training)


def tell_train(wire: Wire, since: int, seconds: float, report: Report) -> None:
    """The claims, of requests from the one numbered `since` on."""
    counts = wire.counts(since)
    for kind, number in sorted(counts.items()):
        most = MOST_LIST_RATE if kind == "LIST" else None
        report.add(Claim(f"ddm train, one expert: {kind}", number / seconds, "a second", most))
    report.add(Claim("ddm train, one expert: all requests", counts.total() / seconds, "a second", MOST_RATE))
    report.add(Claim("ddm train, one expert: its price", dollars(counts) * DAY / seconds, "$ a day"))
    curves = sum(one.sent for one in wire.requests[since:] if "/tensorboard/" in one.key)
    report.add(Claim("ddm train, one expert: curves", curves / seconds * DAY / 1e9, "GB a day", MOST_CURVES_GB))


def end(training: "subprocess.Popen[bytes]") -> None:
    """Ctrl-C, and SIGKILL of its session where that isn't enough."""
    training.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        training.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(training.pid, signal.SIGKILL)
    training.wait()


def main() -> None:
    args = measuring(__doc__ or "", MEASURES, SIZES, QUICK)
    report = Report()
    with tempfile.TemporaryDirectory(dir=args.folder) as name, s3_server(Path(name) / "s3.log") as server:
        if "look" in args.measure:
            measure_look(args, server, report)
        if "train" in args.measure:
            measure_train(args, Path(name), server, report)
    report.finish(args.json)


if __name__ == "__main__":
    main()
