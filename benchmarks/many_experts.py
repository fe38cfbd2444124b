"""What hundreds of experts cost beside eight: files, requests, memory, starts, images, and the router's head.

Runs of tiny random networks, K of 8, 64, 256 and 1,024, all in this process and measured in turn. Run: listings and
reads of a status, of the check before a launch, of an island's look and of a server's look; the choice of a job.
Pipeline: opening, memory, and images by `once` and `top-1`. Serve: a multiplexed and a colocated engine without Ray:
start, memory, images, and what one expert's newer weights make it read. Router: FLOPs of heads of 8 to 1,024 classes by
recipe, and the time of the smallest. An image that uses one expert should cost the same for any K.
"""

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from claims import Claim, Report, interleaved, measuring, median_and_spread  # noqa: E402

from ddm_ray.config import SamplingSettings, load_recipe  # noqa: E402
from ddm_ray.islands.choose import choose  # noqa: E402
from ddm_ray.islands.run_view import RunObserver, RunView  # noqa: E402
from ddm_ray.islands.worker_heartbeat import WorkerHeartbeat, read_workers  # noqa: E402
from ddm_ray.jobs.published import Weights  # noqa: E402
from ddm_ray.jobs.status import require_sound, survey  # noqa: E402
from ddm_ray.models import weights  # noqa: E402
from ddm_ray.models.flops import forward_flops_per_row  # noqa: E402
from ddm_ray.models.spec import denoiser_spec, router_spec  # noqa: E402
from ddm_ray.pipeline import DDMPipeline  # noqa: E402
from ddm_ray.run.graph import ROUTER, wanted_of  # noqa: E402
from ddm_ray.run.manifest import NAME  # noqa: E402
from ddm_ray.run.run import Run  # noqa: E402
from ddm_ray.sampling.request import SampleRequest  # noqa: E402
from ddm_ray.sampling.run_models import mixture_info  # noqa: E402
from ddm_ray.sampling.trajectory import start  # noqa: E402
from ddm_ray.serve.engine.computing import Computing, Networks  # noqa: E402
from ddm_ray.serve.engine.local_runner import local_engine, multiplexed_engines  # noqa: E402
from ddm_ray.serve.engine.multiplexer import Multiplexer  # noqa: E402
from ddm_ray.serve.engine.versions import Version, Versions  # noqa: E402
from ddm_ray.store.store import Store  # noqa: E402
from tests.random_run import make_run  # noqa: E402

MEASURES = ("run", "pipeline", "serve", "router")
EXPERTS = (8, 64, 256, 1024)
SIZES = {"most": 1024, "repeats": 9, "images": 16}
QUICK = {"most": 64, "repeats": 3, "images": 4}
RECIPES = ("digits", "shapes", "images64", "imagenet256-k8")
FLAT, UP_TO, MOST_HEAD = 1.1, 256, 0.05
"""An image's time over that with the fewest experts, for so many at most; a head of 1,024 classes, over an expert."""
MOST_LISTS, MOST_REFRESH = 10, 4
"""Listings of a look at a run; reads of a multiplexed server for one expert's newer weights."""
STEPS, DRAWN, RESIDENT = 25, 32, 2


class Requests:
    """Counts this process's requests to storage from its making on: `lists` and `reads`."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        for name in ("read", "read_end", "sizes", "folders"):
            self._count(name, getattr(Store, name))

    def _count(self, name: str, ask: Callable[..., Any]) -> None:
        def asked(*arguments: Any, **named: Any) -> Any:
            self.counts["lists" if name in ("sizes", "folders") else "reads"] += 1
            return ask(*arguments, **named)

        setattr(Store, name, asked)

    def of(self, ask: Callable[[], Any]) -> tuple[Any, Counter[str], float]:
        """What an action gives, the requests that it makes, and its seconds."""
        before, began = self.counts.copy(), time.perf_counter()
        answer = ask()
        return answer, self.counts - before, time.perf_counter() - began


@dataclass(frozen=True)
class Bench:
    """The runs by K, and what is shared by all measures."""

    args: argparse.Namespace
    report: Report
    requests: Requests
    runs: Mapping[int, Run]

    def ratios(self, name: str, sides: Mapping[int, Callable[[], object]], per: float, target: float | None) -> None:
        """The time of each K's side over that of the fewest experts, measured in turn; `per` side: images, or such."""
        named = {str(k): side for k, side in sides.items()}
        seconds = interleaved(named, self.args.repeats, "cpu")
        least, first = min(sides), str(min(sides))
        middle, spread = median_and_spread([each / per * 1e3 for each in seconds[first]])
        self.report.add(Claim(f"{name}, K={first}", middle, "ms", None, spread))
        for k in sorted(sides.keys() - {least}):
            ratios = [own / base for own, base in zip(seconds[str(k)], seconds[first], strict=True)]
            middle, spread = median_and_spread(ratios)
            own_target = target if k <= UP_TO else None
            self.report.add(Claim(f"{name}, K={k}", middle, f"x K={first}", own_target, spread))


def measure_run(bench: Bench) -> None:
    """Requests and time of looks at runs: all finished; and with the router's manifest gone, which then trains."""
    for k, run in bench.runs.items():
        jobs = wanted_of(run.config)
        looks: dict[str, Callable[[], object]] = {
            "a first status": partial(survey, run),
            "the check before a launch": partial(require_sound, run, jobs),
        }
        for name, look in looks.items():
            _add_look(bench, f"{name}, K={k}", *bench.requests.of(look)[1:])
        versions = Versions(run)
        with _unfinished(run):
            asked = bench.requests.of(versions.newest)
            _add_look(bench, f"a server's first look, K={k}", *asked[1:])
            asked = bench.requests.of(versions.newest)
            _add_look(bench, f"a server's next look, K={k}", *asked[1:], reads=0)
            _add_island(bench, k, run)


def _add_look(bench: Bench, name: str, counts: Counter[str], seconds: float, reads: int | None = None) -> None:
    bench.report.add(Claim(f"{name}: listings", counts["lists"], "", MOST_LISTS))
    bench.report.add(Claim(f"{name}: reads", counts["reads"], "", reads))
    bench.report.add(Claim(f"{name}: time", seconds * 1e3, "ms"))


def _add_island(bench: Bench, k: int, run: Run) -> None:
    """An island's looks, and its choice among as many free jobs."""
    WorkerHeartbeat(run.store, "here").update(waits="")
    me, *_ = read_workers(run.store)
    observer = RunObserver(run, wanted_of(run.config), lambda _: 1e12)
    view: RunView
    for name in ("first", "next"):
        view, counts, seconds = bench.requests.of(partial(observer.look, me))
        _add_look(bench, f"an island's {name} look, K={k}", counts, seconds)
    jobs = [type(view.jobs[0])(each, 1e12) for each in run.experts]
    _, _, seconds = bench.requests.of(lambda: choose(jobs, view.workers, me.id, frozenset()))
    bench.report.add(Claim(f"the choice among free jobs, K={k}", seconds * 1e3, "ms"))


@contextmanager
def _unfinished(run: Run) -> Iterator[None]:
    """A run whose router hasn't finished: its manifest is away meanwhile."""
    file = Path(run.url) / ROUTER / NAME
    away = file.with_suffix(".away")
    file.rename(away)
    yield
    away.rename(file)


def measure_pipeline(bench: Bench) -> None:
    """Opening, memory, images one by one, and a batch of them."""
    for offload in (None, "host", "disk"):
        pipelines = dict[int, DDMPipeline]()
        for k, run in bench.runs.items():
            before = resident_mib()
            opened = partial(DDMPipeline.from_run, run.url, offload=offload)
            pipelines[k], counts, seconds = bench.requests.of(opened)
            pipelines[k].set_progress_bar_config(disable=True)
            where = f"offload {offload}, K={k}"
            bench.report.add(Claim(f"{where}: opening", seconds, "s"))
            bench.report.add(Claim(f"{where}: reads of opening, an expert", counts["reads"] / k, ""))
            bench.report.add(Claim(f"{where}: memory", resident_mib() - before, "MiB"))
        for strategy in ("once", "top-1"):
            sides = {k: partial(_one_by_one, pipeline, strategy, bench) for k, pipeline in pipelines.items()}
            # From files, an image waits for each expert that it goes to: how many says the random router.
            target = FLAT if offload is None else None
            bench.ratios(f"{strategy}, offload {offload}: an image", sides, bench.args.images, target)
        for k, pipeline in pipelines.items():
            output = pipeline(_labels(bench), seeds=0, strategy="once", num_inference_steps=STEPS)
            drawn = len(set(output.routing_SBK.argmax(dim=2).flatten().tolist()))
            words = f"once, offload {offload}, K={k}: experts of {bench.args.images} images"
            bench.report.add(Claim(words, drawn, ""))


def _labels(bench: Bench) -> list[str]:
    return [str(number % 10) for number in range(bench.args.images)]


def _one_by_one(pipeline: DDMPipeline, strategy: str, bench: Bench) -> None:
    for seed, label in enumerate(_labels(bench)):
        pipeline(label, seeds=seed, strategy=strategy, num_inference_steps=STEPS)


def measure_serve(bench: Bench) -> None:
    """Start, memory and images of engines in this process, which aren't started: this process ticks them itself."""
    for placement in ("multiplexed", "colocated"):
        engines = dict[int, Any]()
        for k, run in bench.runs.items():
            computing = Computing(resident=RESIDENT if placement == "multiplexed" else None)
            networks = Networks(run.config.data, mixture_info(run), computing)
            place = partial(_placed, run, networks, placement)
            engines[k], counts, seconds = bench.requests.of(place)
            where = f"{placement}, K={k}"
            bench.report.add(Claim(f"{where}: start", seconds, "s"))
            bench.report.add(Claim(f"{where}: reads of the start, an expert", counts["reads"] / k, ""))
            if placement == "multiplexed":
                slots = engines[k]._experts
                here = len(slots._free) + len(slots._slots)
                bench.report.add(Claim(f"{where}: experts' weights on the device", here, "", RESIDENT))
                _add_refresh(bench, k, run, networks)
        infos = {k: mixture_info(run) for k, run in bench.runs.items()}
        few = {k: partial(_images, engines[k], infos[k], 2, bench.args.images) for k in bench.runs}
        bench.ratios(f"{placement}: an image, 2 experts have work", few, bench.args.images, FLAT)
        many = {k: partial(_images, engines[k], infos[k], DRAWN, DRAWN) for k in bench.runs if k >= DRAWN}
        bench.ratios(f"{placement}: an image, {DRAWN} experts have work", many, DRAWN, FLAT)


def _placed(run: Run, networks: Networks, placement: str) -> Any:
    """An engine as the server makes it: every expert's weights are read and verified once."""

    async def load(version: Version, each: Weights) -> bool:
        networks.of(each, version.run)
        return True

    info, version = mixture_info(run), asyncio.run(Versions(run).loadable(load))
    if placement == "multiplexed":
        engine: Any = multiplexed_engines(info, version, networks, run.config.data)
    else:
        engine = local_engine(info, version, list(range(len(run.experts))), networks, run.config.data)
    engine.close()
    for each in (engine, *engine._engines.values()) if isinstance(engine, Multiplexer) else (engine,):
        each._closed = False
    return engine


def _add_refresh(bench: Bench, k: int, run: Run, networks: Networks) -> None:
    """What an engine of the next version reads, of which one expert has newer weights: those of its last step again."""
    newest = Versions(run).newest()
    first = newest.experts[0]
    assert first is not None
    newer = replace(first, step=1, final=False)
    version = Version(run, (newer, *newest.experts[1:]), newest.router)
    build = partial(multiplexed_engines, mixture_info(run), version, networks, run.config.data)
    engines, counts, seconds = bench.requests.of(build)
    engines.close()
    bench.report.add(
        Claim(f"multiplexed, K={k}: reads for one expert's newer weights", counts["reads"], "", MOST_REFRESH)
    )
    bench.report.add(Claim(f"multiplexed, K={k}: time of that", seconds, "s"))


def _images(engine: Any, info: Any, experts: int, images: int) -> None:
    """Images of so many experts, asked for at once."""
    settings = SamplingSettings(strategy="oracle", steps=STEPS)
    futures = []
    for number in range(images):
        cluster = number % experts
        request = SampleRequest((number,), torch.tensor([number % 10]), settings, torch.tensor([cluster]))
        own = engine.of_expert[cluster] if isinstance(engine, Multiplexer) else engine
        futures.append(own.submit(start(request, info), 1e9))
    while engine.tick():
        pass
    for future in futures:
        future.result()


def measure_router(bench: Bench) -> None:
    """What a class more costs: FLOPs of a row's forward as a share of one expert's, and the time of a tiny router."""
    for recipe in RECIPES:
        config = load_recipe(recipe)
        tokens = 0 if config.data.text is None else config.data.text.tokens
        count = partial(forward_flops_per_row, image_shape=config.data.shape, text_tokens=tokens)
        expert = count(weights.build(denoiser_spec(config), "meta"))
        routers = {k: count(weights.build(_router(config, k), "meta")) for k in EXPERTS}
        for k, flops in routers.items():
            bench.report.add(Claim(f"{recipe}: router of {k} classes", flops / expert, "x an expert"))
        head = (routers[1024] - routers[8]) / expert
        bench.report.add(Claim(f"{recipe}: 1,016 classes more", head, "x an expert", MOST_HEAD))
    config = load_recipe("digits")
    inputs = torch.randn(16, *config.data.shape), torch.rand(16), torch.arange(16) % 10
    made = {k: weights.build(_router(config, k)).eval() for k in EXPERTS}
    with torch.inference_mode():
        sides = {k: partial(_calls, network, inputs) for k, network in made.items()}
        bench.ratios("digits: a call of the router, 16 rows", sides, 20, None)


def _router(config: Any, classes: int) -> dict[str, Any]:
    spec = router_spec(config)
    return spec | {"config": spec["config"] | {"num_experts": classes}}


def _calls(network: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    for _ in range(20):
        network(*inputs)


def resident_mib() -> float:
    """Memory that this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def made_run(folder: Path, experts: int) -> Run:
    """A run of so many experts, finished with random weights."""
    settings = (
        f"partition.num_clusters={experts}",
        f"partition.num_fine={max(64, experts)}",
        f"expert.train.global_batch={experts}",
    )
    return make_run(str(folder / f"{experts}"), settings=settings, num_rows=max(400, 4 * experts))


def main() -> None:
    args = measuring(__doc__ or "", MEASURES, SIZES, QUICK)
    torch.set_num_threads(1)
    report = Report()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        counts = [k for k in EXPERTS if k <= args.most]
        runs = {k: made_run(Path(name), k) for k in counts} if {*args.measure} != {"router"} else {}
        bench = Bench(args, report, Requests(), runs)
        measures = {
            "run": measure_run,
            "pipeline": measure_pipeline,
            "serve": measure_serve,
            "router": measure_router,
        }
        for measure in args.measure:
            measures[measure](bench)
    report.finish(args.json)


if __name__ == "__main__":
    main()
