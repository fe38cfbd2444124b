"""Load on one class alone: its expert grows, the others stay; then all sleep, and the first image wakes one. Plotted.

Each expert is a deployment of its own, on a Ray cluster of one node on this machine.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from claims import Claim, Report, options
from matplotlib.figure import Figure
from serving_cluster import cluster_serving
from serving_load import Answer, Client, closed_loop

from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import mixture_info


def measure_scaling(run: str, args: Any, report: Report) -> None:
    """Load on one class, whose expert alone has to grow; then none, and the first image of an expert at zero."""
    scaling = {
        "min_replicas": 0,
        "initial_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 4,
        "upscale_delay_s": 2,
        "downscale_delay_s": 5,
        "downscale_to_zero_delay_s": 10,
        "metrics_interval_s": 1,
        "look_back_period_s": 5,
    }
    fixed = {"num_replicas": 1}
    loaded = _expert_of_class(run, 0)
    with cluster_serving(run, lambda name: fixed if name == "api" else {"autoscaling_config": scaling}, 1) as served:
        experts = [f"expert-{k:03d}" for k in range(4)]
        counts, stop, began = list[tuple[float, dict[str, int]]](), threading.Event(), time.monotonic()

        def count() -> None:
            while not stop.wait(0.5):
                counts.append((time.monotonic() - began, {name: served.running(name) for name in experts}))

        counting = threading.Thread(target=count)
        counting.start()
        body = {"class_label": 0, "strategy": "once", "steps": 200}
        answers = closed_loop(served.port, 24, args.load_seconds, lambda number: {**body, "seed": number})
        ended = time.monotonic() - began
        most = {name: max(each[name] for _, each in counts) for name in experts}
        until = time.monotonic() + 180
        while any(served.running(name) for name in experts) and time.monotonic() < until:
            time.sleep(0.5)
        asleep = time.monotonic() - began
        slept = not any(served.running(name) for name in experts)
        client, woken, refused = Client(served.port), time.monotonic(), list[Answer]()
        while (first := client.ask(**body, seed=1, timeout=60.0)).status == 503:
            refused.append(first)
            time.sleep(float(first.headers.get("retry-after", 1)))
        waited = time.monotonic() - woken
        time.sleep(2)
        stop.set()
        counting.join()
    report.add(Claim(f"scaling: replicas of {loaded}, whose class is asked for", -most[loaded], "(negative)", -2))
    others = max(most[name] for name in experts if name != loaded)
    report.add(Claim("scaling: replicas of any other", others, "", 1))
    statuses = [answer.status for answer in answers]
    report.add(Claim("scaling: lost under load", sum(each not in (200, 429) for each in statuses), "requests", 0))
    report.add(Claim("scaling: refused under load", statuses.count(429), f"of {len(statuses)}, by 429"))
    report.add(Claim("scaling: all at zero", asleep - ended if slept else 1e9, "s after the load"))
    report.add(Claim("scaling: first image from zero", waited if first.status == 200 else 1e9, "s", 15))
    longest = max([answer.seconds for answer in refused], default=0.0)
    report.add(
        Claim("scaling: longest wait for a 503 with Retry-After meanwhile", longest, f"s, {len(refused)} of them", 10)
    )
    if args.plot is not None:
        _plot(args.plot, counts, experts, ended)


def _expert_of_class(run: str, label: int) -> str:
    prior_CK = mixture_info(Run.open(run)).prior_CK
    assert prior_CK is not None
    return f"expert-{int(prior_CK[label].argmax()):03d}"


def _plot(path: Path, counts: list[tuple[float, dict[str, int]]], experts: list[str], ended: float) -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    for shift, name in enumerate(experts):
        axes.step([at for at, _ in counts], [each[name] + 0.04 * shift for _, each in counts], where="post", label=name)
    axes.axvspan(0, ended, color="#eeeeee", zorder=0)
    axes.text(1, 3.3, "24 clients ask for class 0", fontsize=8, color="#555555")
    axes.set(xlabel="seconds", ylabel="replicas that run", ylim=(-0.2, 3.6), yticks=range(4))
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper right")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("run", metavar="RUN", help="a finished run with classes, such as runs/digits of `make demo`")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="write a picture of the replicas over time here")
    args = parser.parse_args()
    args.load_seconds = 40.0 if args.quick else 60.0
    report = Report("cpu")
    measure_scaling(os.path.abspath(args.run), args, report)
    report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
