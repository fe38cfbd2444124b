"""Serving beside the pipeline: latency, calls, throughput, overload, and what more experts cost.

`digits` is the run that is named, such as the demo's; `wide` has random weights: a DiT of 384 x 4 at 64 tokens, of
which the network takes nearly all the time. Milliseconds of processors are those of all the server's processes, less
what it takes while nobody asks. The clients share the same processors, so images a second are lower than they would be
alone; ratios and milliseconds of processors aren't. With --against, another commit's server takes turns with this one.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from claims import Claim, Report, interleaved, median_and_spread, options
from serving_load import Answer, Client, Served, closed_loop, open_loop, probing, quantile, serving

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own runs of random weights

from ddm_ray.config import SamplingSettings
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.offload import OffloadedToHost
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models, load_models, mixture_info
from ddm_ray.sampling.trajectory import start_as_noise
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.computing import Computing, Networks
from ddm_ray.serve.engine.local_runner import LocalRunner, multiplexed_engines
from ddm_ray.serve.engine.segments import SegmentSampler
from ddm_ray.serve.engine.versions import Versions
from tests.random_run import make_run

MEASURES = ("engine", "latency", "calls", "throughput", "overload", "experts", "swaps")
HELD, MIXED = ("once", "top-1", "sticky"), ("top-2", "nucleus-0.9", "full")
WIDE = ("expert.model={width: 384, depth: 4, heads: 6, patch_size: 1}", "router.model={width: 64, depth: 2, heads: 2}")
BATCH = 8
VARIED = (
    {},
    {"steps": 20, "solver": "euler"},
    {"solver": "heun", "steps": 15},
    {"guidance_scale": 2.0},
    {"solver": "midpoint", "steps": 12},
    {"steps": 30, "times": "cosine"},
    {"guidance_scale": 3.0, "guidance_interval": (0.2, 0.8)},
    {"steps": 40},
)


def measure_engine(name: str, run: str, args: Any, report: Report) -> None:
    """Eight rows, each at another time under other settings, beside static batches of eight of the same settings."""
    models = load_models(Run.open(run))
    for strategy in ("once", "top-1"):
        alike = partial(_continuous, models, strategy, [{}], args.images)
        varied = partial(_continuous, models, strategy, VARIED, args.images)
        sides: dict[str, Callable[[], float]] = {
            "static": partial(_static, models, strategy, [{}], args.images),
            "continuous": alike,
            "static, varied": partial(_static, models, strategy, VARIED, args.images),
            "continuous, varied": varied,
        }
        seconds = _in_turns(sides, args.repeats)
        for kind in ("", ", varied"):
            ratios = [a / b for a, b in zip(seconds[f"continuous{kind}"], seconds[f"static{kind}"], strict=True)]
            _add(
                report, f"{name}, {strategy}{kind}: engine over static batches of 8", ratios, "x", 1 / args.least[name]
            )


def _static(models: Models, strategy: str, varied: Sequence[dict[str, Any]], images: int) -> float:
    """Seconds of a processor an image, in batches of eight, each of one setting."""
    batches = max(len(varied), images // BATCH)
    began = time.process_time()
    for number in range(batches):
        models.sample(_request(strategy, BATCH * number, BATCH, varied[number % len(varied)]))
    return (time.process_time() - began) / BATCH / batches


def _continuous(models: Models, strategy: str, varied: Sequence[dict[str, Any]], images: int) -> float:
    """Seconds of a processor an image, eight always on their way, each at another velocity."""
    engine = BatchEngine(partial(driver.answers, experts=models.experts, router=models.router))
    begun, done = 0, 0

    def end(_: object) -> None:
        nonlocal done
        done += 1

    def begin() -> None:
        nonlocal begun
        request = _request(strategy, begun, 1, varied[begun % len(varied)])
        engine.submit(start_as_noise(request, models.info), 1e9).add_done_callback(end)
        begun += 1

    while begun < BATCH:
        begin()
        for _ in range(3):
            engine.tick()
    before, began = done, time.process_time()
    while done < before + images:
        while begun - done < BATCH:
            begin()
        engine.tick()
    return (time.process_time() - began) / (done - before)


def _request(strategy: str, seed: int, count: int, changes: dict[str, Any]) -> SampleRequest:
    seeds = tuple(range(seed, seed + count))
    return SampleRequest(seeds, torch.tensor(seeds) % 10, SamplingSettings(strategy=strategy, **changes))


def measure_latency(run: str, args: Any, report: Report) -> None:
    """One image by one client: the server's time less the pipeline's, all in turns."""
    pipeline = DDMPipeline.from_run(run)
    with ExitStack() as stack:
        clients = {
            where: Client(stack.enter_context(serving(run, "--placement", where)).port)
            for where in ("colocated", "per-expert")
        }
        for steps in (25, 50):
            for strategy in (*HELD, *MIXED):
                chosen = {"strategy": strategy, "num_inference_steps": steps}
                sides: dict[str, Callable[[], object]] = {
                    "pipeline": partial(lambda **own: pipeline(["7"], seeds=1, **own).images[0].tobytes(), **chosen)
                }
                for where, client in clients.items():
                    sides[where] = partial(_made, client, prompt="7", seed=1, **chosen)
                seconds = interleaved(sides, args.latencies, "cpu")
                for where in clients:
                    more = [a - b for a, b in zip(seconds[where], seconds["pipeline"], strict=True)]
                    name, mixes = f"{where}, {strategy}, {steps} steps", strategy in MIXED and where == "per-expert"
                    if mixes:
                        report.add(Claim(f"{name}: more a step", 1e3 * quantile(more, 0.5) / steps, "ms", 3))
                        continue
                    report.add(Claim(f"{name}: more than the pipeline", 1e3 * quantile(more, 0.5), "ms", 10))
                    report.add(Claim(f"{name}: p99 of it", 1e3 * quantile(more, 0.99), "ms", 30))


def measure_calls(run: str, args: Any, report: Report) -> None:
    """Calls of an expert's engine an image, each expert in a process of its own."""
    with serving(run, "--placement", "per-expert") as served:
        client = Client(served.port)
        for strategy, most in zip(HELD, (1.0, 1.2, 1.1), strict=True):
            for steps in (25, 50):
                before = served.metric("ddm_segments_total")
                for seed in range(args.images):
                    _made(client, class_label=seed % 10, seed=seed, strategy=strategy, steps=steps)
                calls = (served.metric("ddm_segments_total") - before) / args.images
                report.add(Claim(f"{strategy}, {steps} steps: calls an image", calls, "", most))


def measure_throughput(run: str, args: Any, report: Report) -> None:
    """Images a second, and milliseconds of processors an image, by clients that ask again and again."""
    with ExitStack() as stack:
        sides = {"": stack.enter_context(serving(run))}
        if args.against:
            sides[", before"] = stack.enter_context(serving(run, tree=args.against.resolve()))
        idle = {side: served.idle_share() for side, served in sides.items()}
        for side, share in idle.items():
            report.add(Claim(f"idle{side}", share, "of a processor"))
        for strategy, steps in (("once", 1), ("once", 25), ("top-1", 25), ("full", 25)):
            for num_clients in (1, 8, 32):
                for side, served in sides.items():
                    images, cost = _load(served, idle[side], num_clients, args.seconds, strategy, steps)
                    name = f"{strategy}, {steps} steps, {num_clients} clients{side}"
                    target = {("once", 1): 12, ("top-1", 25): 25}.get((strategy, steps)) if num_clients == 32 else None
                    report.add(Claim(f"{name}: images", images, "a second"))
                    report.add(Claim(f"{name}: processors", 1e3 * cost, "ms an image", None if side else target))


def _load(
    served: Served, idle: float, num_clients: int, seconds: float, strategy: str, steps: int
) -> tuple[float, float]:
    """Images a second, and seconds of processors an image."""
    body = _body(strategy, steps)
    closed_loop(served.port, num_clients, 1, body)
    before, began = served.cpu_seconds(), time.monotonic()
    answers = closed_loop(served.port, num_clients, seconds, body)
    took = time.monotonic() - began
    good = sum(answer.status == 200 for answer in answers)
    return good / took, (served.cpu_seconds() - before - idle * took) / max(good, 1)


def measure_overload(run: str, args: Any, report: Report) -> None:
    """Five times as many requests as can be met, for a while; the time each has is ten times what it takes alone.

    Of `wide`: to refuse a request takes Serve 5 ms of processors, which is a third of an image of `digits`.
    """
    with serving(run) as served:
        for strategy in ("once", "top-1"):
            body = _body(strategy, 25)
            alone = quantile([each.seconds for each in closed_loop(served.port, 1, 3, body)], 0.5)
            began = time.monotonic()
            capacity = len(closed_loop(served.port, BATCH, args.seconds, body)) / (time.monotonic() - began)
            timed = partial(_with_timeout, body, 10 * alone)
            began = time.monotonic()
            with probing(served.port, "/healthz") as probes:
                answers = open_loop(served.port, 5 * capacity, args.overload_seconds, timed)
                drained = time.monotonic() - began - args.overload_seconds
            good = [each for each in answers if each.status == 200 and each.seconds <= 10 * alone]
            refused = [each.seconds for each in answers if each.status == 429]
            share = len(good) / args.overload_seconds / capacity
            report.add(Claim(f"overload, {strategy}: capacity lost", 1 - share, "of it", 0.1))
            report.add(Claim(f"overload, {strategy}: refusals, p99", 1e3 * quantile(refused, 0.99), "ms", 100))
            health = quantile([each.seconds for each in probes], 0.99)
            report.add(Claim(f"overload, {strategy}: /healthz, p99", 1e3 * health, "ms", 100))
            report.add(Claim(f"overload, {strategy}: drained after", drained, "s", max(1.0, 10 * alone)))
            late = len([each for each in answers if each.status == 408 or each.status == 200]) - len(good)
            report.add(Claim(f"overload, {strategy}: late", late / len(answers), "of all"))
            others = len(answers) - len(good) - len(refused) - late
            report.add(Claim(f"overload, {strategy}: none of these", others / len(answers), "of all"))


def measure_experts(folder: Path, args: Any, report: Report) -> None:
    """What an image of `wide` costs with 1, 4 and 8 experts in one process, in turns, and what each expert more takes.

    Of 8 clients' rows each of 8 experts has one or two, and calls of so few cost a row more, whoever makes them.
    """
    counts, kinds = (1, 4, 8), [("once", 8), ("once", 32), ("top-1", 8), ("top-1", 32), ("top-2", 8)]
    with ExitStack() as stack:
        servers = {count: stack.enter_context(serving(_wide(folder, count))) for count in counts}
        idle = {count: served.idle_share() for count, served in servers.items()}
        costs = dict[tuple[int, str, int], list[float]]()
        for _ in range(3):
            for strategy, num_clients in kinds:
                for count, served in servers.items():
                    if strategy == "top-2" and count == 1:
                        continue
                    _, cost = _load(served, idle[count], num_clients, args.seconds, strategy, 10)
                    costs.setdefault((count, strategy, num_clients), []).append(cost)
        memory = {count: served.memory_mib() for count, served in servers.items()}
    median = {kind: median_and_spread(own)[0] for kind, own in costs.items()}
    for strategy, num_clients in kinds[:4]:
        own = [median[count, strategy, num_clients] for count in counts]
        name = f"wide, {strategy}, {num_clients} clients: dearest over cheapest of 1, 4, 8 experts"
        report.add(Claim(name, max(own) / min(own), "x", 1.15))
    for count in counts[1:]:
        ratio = median[count, "top-2", 8] / median[count, "top-1", 8]
        report.add(Claim(f"wide, {count} experts: top-2 over top-1", ratio, "x", 2.1))
    report.add(Claim("wide: memory of an expert more", (memory[8] - memory[4]) / 4, "MiB"))


def measure_swaps(url: str, args: Any, report: Report) -> None:
    """Weights brought to two slots for an image, by `once`: one image after the other, and 32 always on their way."""
    run, images = Run.open(url), max(64, args.images)
    asked = [_request("once", seed, 1, {"steps": 10}) for seed in range(images)]
    models, info = load_models(run, offload="host"), mixture_info(run)
    networks = Networks(run.config.data, info, Computing(max_rows=32, resident=2))
    engines = multiplexed_engines(info, Versions(run).newest(), networks, run.config.data)
    assert isinstance(models.experts, OffloadedToHost)
    began = time.process_time()
    for request in asked:
        models.sample(request)
    alone, alone_s = models.experts.num_fetched / images, time.process_time() - began
    sampler = SegmentSampler(models.info, [*map(LocalRunner, engines.of_expert)], LocalRunner(engines.mixing))
    before, began = engines.swaps_K.sum(), time.process_time()
    asyncio.run(_at_most(32, [sampler.sample(request, 1e4) for request in asked]))
    shared, shared_s = float(engines.swaps_K.sum() - before) / images, time.process_time() - began
    engines.close()
    report.add(Claim("wide, 8 experts, two slots, one at a time: swaps", alone, "an image"))
    report.add(Claim("wide, 8 experts, two slots, multiplexed: swaps", shared, "an image", alone / 2))
    report.add(Claim("wide, 8 experts: multiplexed over one at a time, processors", shared_s / alone_s, "x", 1))


async def _at_most(count: int, work: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Do all of this, so many at a time."""
    places = asyncio.Semaphore(count)

    async def done(each: Coroutine[Any, Any, object]) -> None:
        async with places:
            await each

    await asyncio.gather(*map(done, work))


def _wide(folder: Path, num_experts: int) -> str:
    url = folder / f"wide-{num_experts}"
    if not url.exists():
        settings = (*WIDE, f"partition.num_clusters={num_experts}", "evaluate.strategies=[once]")
        make_run(str(url), "digits", settings, num_rows=40 * num_experts)
    return str(url)


def _body(strategy: str, steps: int) -> Callable[[int], dict[str, Any]]:
    return lambda number: {"class_label": number % 10, "seed": number, "strategy": strategy, "steps": steps}


def _with_timeout(body: Callable[[int], dict[str, Any]], seconds: float, number: int) -> dict[str, Any]:
    return body(number) | {"timeout": seconds}


def _made(client: Client, **body: Any) -> Answer:
    answer = client.ask(**body)
    if answer.status != 200:
        sys.exit(f"{answer.status}: {answer.body[:500]!r}")
    return answer


def _in_turns(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Values of each side, `repeats` times all of them in turn after one round unmeasured."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            value = side()
            if repeat:
                values[name].append(value)
    return values


def _add(report: Report, name: str, values: Sequence[float], unit: str, target: float) -> None:
    median, spread = median_and_spread(values)
    report.add(Claim(name, median, unit, target, spread))


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("run", metavar="RUN", help="a finished run with classes, such as runs/digits of `make demo`")
    parser.add_argument("--measure", nargs="+", default=MEASURES, choices=MEASURES)
    parser.add_argument("--against", type=Path, metavar="TREE", help="another commit's checkout, for throughput")
    args = parser.parse_args()
    args.least = {"digits": 0.9, "wide": 0.95}
    args.repeats, args.images, args.latencies = (3, 50, 30) if args.quick else (9, 200, 100)
    args.seconds, args.overload_seconds = (4.0, 10.0) if args.quick else (10.0, 60.0)
    torch.set_num_threads(1)
    report = Report("cpu")
    with tempfile.TemporaryDirectory() as folder:
        if "engine" in args.measure:
            measure_engine("digits", args.run, args, report)
            measure_engine("wide", _wide(Path(folder), 4), args, report)
        named = {"latency": measure_latency, "calls": measure_calls}
        named |= {"throughput": measure_throughput, "overload": measure_overload}
        for name, measure in named.items():
            if name in args.measure:
                measure(_wide(Path(folder), 4) if name == "overload" else args.run, args, report)
        if "swaps" in args.measure:
            measure_swaps(_wide(Path(folder), 8), args, report)
        if "experts" in args.measure:
            measure_experts(Path(folder), args, report)
    report.finish(args.json)


if __name__ == "__main__":
    main()
