"""A server under faults: what is lost, for how long, and whether images stay the pipeline's.

Each expert is a deployment of its own, on a Ray cluster of several nodes on this machine, behind a gateway. `kills`: an
open loop at half of capacity while processes are killed. `gone`: an expert's weights are moved away and its replicas
killed. `equality`: random requests, among kills, beside the pipeline.
"""

import base64
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from claims import Claim, Report, options
from PIL import Image
from serving_cluster import ServedCluster, cluster_serving
from serving_load import Answer, Client, closed_loop, quantile, run_all

from ddm_ray.pipeline import DDMPipeline

MEASURES = ("kills", "gone", "equality")
MIX = ("once", "once", "top-1", "top-1", "sticky", "top-2", "full")
STEPS = 10
EXPERT = "ServeReplica:ddm:expert-"


def body_of(number: int) -> dict[str, Any]:
    """The n-th request of a mixture of strategies."""
    strategy = MIX[number % len(MIX)]
    return {"class_label": number % 10, "seed": number % 100, "strategy": strategy, "steps": STEPS}


@dataclass
class Load:
    """Requests at a steady rate until it is told to stop; answers with the time when each came."""

    port: int
    a_second: float
    answers: list[tuple[float, int, Answer]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Load":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        idle, threads, lock = list[Client](), list[threading.Thread](), threading.Lock()
        began, number = time.monotonic(), 0

        def ask(number: int) -> None:
            with lock:
                client = idle.pop() if idle else Client(self.port)
            answer = client.ask(**body_of(number))
            with lock:
                idle.append(client)
                self.answers.append((time.monotonic(), number, answer))

        while not self._stop.wait(max(0.0, began + number / self.a_second - time.monotonic())):
            threads = [thread for thread in threads if thread.is_alive()]
            threads.append(threading.Thread(target=ask, args=[number]))
            threads[-1].start()
            number += 1
        for thread in threads:
            thread.join()

    def lost(self, since: float, until: float) -> list[Answer]:
        """Answers of a span that aren't images."""
        return [answer for at, _, answer in self.answers if since <= at < until and answer.status != 200]

    def hole(self, since: float, until: float) -> float:
        """The longest span without an image."""
        times = [since, *sorted(at for at, _, answer in self.answers if since <= at < until and answer.status == 200)]
        return max(b - a for a, b in zip(times, [*times[1:], until], strict=True))


def measure_kills(run: str, args: Any, report: Report) -> None:
    """SIGKILL of each kind of process, two replicas of each deployment, then one."""
    right = _Right(run)
    for num_replicas in (2, 1):
        spread = {"num_replicas": num_replicas, "max_replicas_per_node": 1}
        with cluster_serving(run, lambda _, spread=spread: spread, num_nodes=2) as served:
            capacity = _capacity(served, args.seconds)
            kinds: dict[str, Callable[[], None]] = {
                "expert": lambda: _kill(served, f"{EXPERT}001"),
                "ingress": lambda: _kill(served, "ServeReplica:ddm:api"),
                "controller": lambda: _kill(served, "ServeController"),
                **({"node": served.kill_node} if num_replicas > 1 else {}),
                "proxy": lambda: _kill(served, "ProxyActor"),
                "gateway": lambda: _kill(served, "haproxy"),
            }
            with Load(served.port, capacity / 2) as load:
                for kind, kill in kinds.items():
                    for _ in range(args.kills):
                        time.sleep(args.seconds)
                        began = time.monotonic()
                        kill()
                        time.sleep(2 * args.seconds)
                        back = served.until_whole(num_replicas)
                        time.sleep(args.seconds)
                        limit = 5 if kind in ("proxy", "gateway") else 1 if num_replicas > 1 else None
                        _tell(report, f"{kind}, {num_replicas} of each", limit, load, began, time.monotonic(), back)
            wrong = right.count_wrong(load)
            name = f"{num_replicas} of each"
            report.add(Claim(f"{name}: requests", len(load.answers), f"at {capacity / 2:.3g} a second"))
            report.add(Claim(f"{name}: images more than a grey level from the pipeline's", wrong, "", 0))
            degraded = sum(b'"degraded"' in answer.body for _, _, answer in load.answers)
            report.add(Claim(f"{name}: degraded", degraded, "answers"))


def _tell(report: Report, name: str, limit: float | None, load: Load, since: float, until: float, back: float) -> None:
    """Claims on a kill; `limit` of the span without an image."""
    lost = load.lost(since, until)
    kinds = sorted({f"{answer.status}" for answer in lost})
    most = None if name.startswith("gateway") else 0  # what is in flight on it can't be asked again
    report.add(Claim(f"SIGKILL, {name}: lost", len(lost), f"requests {' '.join(kinds)}".rstrip(), most))
    for body in {answer.body[:200] for answer in lost}:
        report.progress(f"  {body!r}")
    report.add(Claim(f"SIGKILL, {name}: without an image", load.hole(since, until), "s", limit))
    report.add(Claim(f"SIGKILL, {name}: whole again after", back, "s"))


def _kill(served: ServedCluster, title: str) -> None:
    os.kill(served.pids(title)[0], signal.SIGKILL)


def _capacity(served: ServedCluster, seconds: float) -> float:
    closed_loop(served.port, 8, 2.0, body_of)
    began = time.monotonic()
    return len(closed_loop(served.port, 8, seconds, body_of)) / (time.monotonic() - began)


class _Right:
    """Images of the pipeline, each made once."""

    def __init__(self, run: str):
        self._pipeline = DDMPipeline.from_run(run)
        self._images: dict[tuple[Any, ...], np.ndarray] = {}

    def count_wrong(self, load: Load) -> int:
        """Images of whole answers that differ by more than a grey level."""
        wrong = 0
        for _, number, answer in load.answers:
            if answer.status == 200 and b'"degraded"' not in answer.body:
                (served,) = images_of(answer)
                wrong += int(np.abs(served - self._image(**body_of(number))).max()) > 1
        return wrong

    def _image(self, class_label: int, seed: int, strategy: str, steps: int) -> np.ndarray:
        key = (class_label, seed, strategy, steps)
        if key not in self._images:
            made = self._pipeline(class_labels=[class_label], seeds=seed, strategy=strategy, num_inference_steps=steps)
            self._images[key] = np.asarray(made.images[0]).astype(int)
        return self._images[key]


def images_of(answer: Answer) -> list[np.ndarray]:
    encoded = [item["b64_json"] for item in json.loads(answer.body)["data"]]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))).astype(int) for each in encoded]


def measure_gone(run: str, args: Any, report: Report) -> None:
    """An expert whose weights can't be loaded any more, and whose replicas are killed."""
    with tempfile.TemporaryDirectory() as folder:
        own = shutil.copytree(run, Path(folder) / "run")
        with cluster_serving(str(own), lambda _: {"num_replicas": 2, "max_replicas_per_node": 1}) as served:
            capacity = _capacity(served, args.seconds)
            with Load(served.port, capacity / 2) as load:
                time.sleep(2 * args.seconds)
                (weights,) = (own / "experts/001").glob("attempts/*/weights/*/ema.safetensors")
                gone_at = time.monotonic()
                weights.rename(weights.with_suffix(".away"))
                for pid in served.pids(f"{EXPERT}001"):
                    os.kill(pid, signal.SIGKILL)
                time.sleep(4 * args.seconds)
                ready = Client(served.port).ask("GET", "/readyz")
                until = time.monotonic()
                weights.with_suffix(".away").rename(weights)
                back = served.until_whole(2)
            during = [(at, answer) for at, _, answer in load.answers if gone_at <= at < until]
            degraded = [at for at, answer in during if b'"degraded"' in answer.body]
            before = [answer.seconds for at, _, answer in load.answers if at < gone_at]
            others = [answer.seconds for at, answer in during if at > gone_at + 2 and b'"degraded"' not in answer.body]
            report.add(Claim("gone: lost", sum(answer.status != 200 for _, answer in during), "requests", 0))
            report.add(Claim("gone: degraded first after", min(degraded, default=1e9) - gone_at, "s", 2))
            report.add(Claim("gone: longest answer", max(answer.seconds for _, answer in during), "s"))
            ratio = quantile(others, 0.5) / quantile(before, 0.5)
            report.add(Claim("gone: others' p50 over that before", ratio, "x", 1.2))
            report.add(Claim("gone: /readyz names it", b"expert-001" not in ready.body, "(0: yes)", 0))
            report.add(Claim("gone: whole again after", back, "s"))


def measure_equality(run: str, args: Any, report: Report) -> None:
    """Random requests of eight clients, an expert killed again and again, each image beside the pipeline's."""
    pipeline, chance = DDMPipeline.from_run(run), random.Random(0)
    asked = [_random(chance) for _ in range(args.requests)]
    answers = list[Answer | None]([None] * len(asked))
    with cluster_serving(run, lambda _: {"num_replicas": 2, "max_replicas_per_node": 1}) as served:
        numbers, lock, stop = iter(range(len(asked))), threading.Lock(), threading.Event()

        def ask() -> None:
            client = Client(served.port)
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                answers[number] = client.ask(**asked[number], timeout=120.0)

        def kill() -> None:
            kills = 0
            while not stop.wait(args.seconds):
                _kill(served, f"{EXPERT}{kills % 4:03d}")
                kills += 1
                served.until_whole(2)
            report.add(Claim("equality: experts killed", kills, ""))

        killing = threading.Thread(target=kill)
        killing.start()
        run_all([threading.Thread(target=ask) for _ in range(8)])
        stop.set()
        killing.join()
    pixels = differing = worst = traces = lost = degraded = switches = 0
    for own, answer in zip(asked, answers, strict=True):
        assert answer is not None
        if answer.status != 200 or b'"degraded"' in answer.body:
            lost, degraded = lost + (answer.status != 200), degraded + (answer.status == 200)
            continue
        changes = {name: value for name, value in own.items() if name not in ("class_label", "n", "seed")}
        made = pipeline(class_labels=[own["class_label"]] * own["n"], seeds=own["seed"], **changes)
        for served_HW, image in zip(images_of(answer), made.images, strict=True):
            distance = np.abs(served_HW - np.asarray(image).astype(int))
            pixels, differing, worst = (
                pixels + distance.size,
                differing + int((distance > 0).sum()),
                max(worst, int(distance.max())),
            )
        ways = [
            [part["expert"] for part in way for _ in range(part["steps"])] for way in json.loads(answer.body)["experts"]
        ]
        traces += ways != made.experts_SB.T.tolist()
        switches += sum(len(way) - 1 for way in json.loads(answer.body)["experts"])
    report.add(Claim("equality: requests", len(asked), f"{switches} switches among them"))
    report.add(Claim("equality: lost", lost, "requests", 0))
    report.add(Claim("equality: degraded", degraded, "requests"))
    report.add(Claim("equality: largest distance", worst, "grey levels", 1))
    report.add(Claim("equality: pixels that differ", differing, f"of {pixels}"))
    report.add(Claim("equality: traces of experts that differ", traces, "requests", 0))


def _random(chance: random.Random) -> dict[str, Any]:
    """A request under settings at random."""
    strategies = ("once", "top-1", "top-2", "full", "sticky", "sticky-0.2", "nucleus-0.9", "threshold-0.05", "sample-1")
    return {
        "class_label": chance.randrange(10),
        "seed": chance.randrange(10**6),
        "n": chance.choice((1, 1, 1, 2, 5)),
        "strategy": chance.choice(strategies),
        "num_inference_steps": chance.choice((1, 4, 10, 25, 50)),
        "solver": chance.choice(("euler", "heun", "midpoint", "ab2")),
        "guidance_scale": chance.choice((1.0, 1.0, 2.0, 0.0, 4.0)),
    }


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("run", metavar="RUN", help="a finished run with classes, such as runs/digits of `make demo`")
    parser.add_argument("--measure", nargs="+", default=MEASURES, choices=MEASURES)
    parser.add_argument("--kills", type=int, help="how often each kind of process is killed; 3, with --quick 1")
    args = parser.parse_args()
    args.seconds, kills, args.requests = (4.0, 1, 100) if args.quick else (10.0, 3, 1000)
    args.kills = args.kills or kills
    report = Report("cpu")
    measures = {"kills": measure_kills, "gone": measure_gone, "equality": measure_equality}
    for name in args.measure:
        measures[name](os.path.abspath(args.run), args, report)
    report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
