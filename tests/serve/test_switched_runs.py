"""A server takes over a derived run's experts, and goes back, while images are asked for. No Ray, no HTTP."""

import asyncio
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings, load_recipe
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import ConfigError
from ddm_ray.run.graph import PARTITION, rows_of
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest, SampleResult
from ddm_ray.sampling.run_models import load_models
from ddm_ray.serve.cluster import expert_replica
from ddm_ray.serve.cluster.mixture import ServedMixture
from ddm_ray.serve.engine.pins import require_fits
from ddm_ray.serve.engine.segments import Sampled
from ddm_ray.serve.engine.versions import Versions
from tests.data.appended import make_base, write_digits
from tests.derived import derive
from tests.random_run import publish_models
from tests.serve.cluster.linked import HOST
from tests.serve.test_runner_contract import PLACEMENTS, TOLERANCE, mixture_of
from tests.store_meter import StoreMeter

pytestmark = pytest.mark.contract

STRATEGIES = ("once", "full", "top-1")
LABELS = torch.tensor([1, 7, 3])
SECONDS = 60.0


@dataclass(frozen=True)
class Chain:
    """A run, and two that were derived from it: cluster 1 has left, and cluster 3 has joined, with another router."""

    first: Run
    left: Run
    joined: Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    folder = tmp_path_factory.mktemp("switched")
    first = make_base(folder, "partition.num_clusters=3", "partition.num_fine=9")
    write_digits(folder / "scans", range(300, 330), inverted=True)
    left = derive(first, "sample.steps=4", url=str(folder / "left"), drop=(1,))
    joined = derive(first, url=str(folder / "joined"), add=((str(folder / "scans"), 1),))
    for artifact in rows_of(joined.config):
        prepare(joined, cluster=artifact.cluster, execute=serial)
    partition(joined)
    publish_models(joined, spread=0.2)
    return Chain(first, left, joined)


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_replica, "get_node_ip_address", lambda: HOST)


def request_of(strategy: str) -> SampleRequest:
    return SampleRequest((3, 4, 5), LABELS, SamplingSettings(strategy=strategy, steps=5, solver="heun"))


Images = Mapping[tuple[str, str], Tensor]
"""Images of a run by its URL and a strategy."""


@pytest.fixture(scope="module")
def images(runs: Chain) -> Images:
    every = {}
    for run in (runs.first, runs.left, runs.joined):
        models = load_models(run)
        every |= {(run.url, each): models.sample(request_of(each)).images_BCHW for each in STRATEGIES}
    return every


def maker(images: Images, strategy: str, sampled: Sampled) -> str:
    """The URL of the one run that makes these images."""
    image_BCHW = sampled.result.images_BCHW
    near = [
        url
        for (url, each), right in images.items()
        if each == strategy and (image_BCHW - right).abs().max() <= TOLERANCE
    ]
    assert len(near) == 1 and not sampled.away, (strategy, near, sampled.away)
    return near[0]


class Clients:
    """Ask a mixture for images of each strategy again and again; each has to be one run's."""

    def __init__(self, mixture: ServedMixture, images: Images):
        self._mixture, self._images, self.made = mixture, images, list[tuple[str, str]]()
        self.tasks = [asyncio.ensure_future(self._ask(each)) for each in STRATEGIES]

    async def _ask(self, strategy: str) -> None:
        while True:
            begun_with = self._mixture.live.version.run.url
            sampled = await self._mixture.live.sample(request_of(strategy))
            assert maker(self._images, strategy, sampled) == begun_with
            self.made.append((strategy, begun_with))

    async def until(self, run: Run) -> None:
        """Wait until images of all strategies are this run's."""
        since = len(self.made)
        while {(each, run.url) for each in STRATEGIES} - set(self.made[since:]):
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)


async def start(run: Run, placement: str, pin_file: Path) -> ServedMixture:
    mixture = await mixture_of(run, placement)
    await mixture.start(Versions(run, str(pin_file)), 0.02)
    return mixture


async def stop(mixture: ServedMixture, *tasks: "asyncio.Future[Any]") -> None:
    for task in (mixture._following, *tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(mixture.live.engine.close)


def pin(pin_file: Path, run: Run) -> None:
    pin_file.write_text(f"run: {run.url}\n")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_image_is_lost_or_mixed_on_the_way_to_derived_runs_and_back(
    runs: Chain, images: Images, tmp_path: Path, placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    pin_file = tmp_path / "pins.yaml"

    async def serve() -> None:
        mixture = await start(runs.first, placement, pin_file)
        clients = Clients(mixture, images)
        await clients.until(runs.first)
        pin(pin_file, runs.left)
        await clients.until(runs.left)
        assert mixture.live.info.clusters == (0, 2) and mixture.live.defaults.steps == 4
        pin(pin_file, runs.joined)
        if placement == "per-expert":
            while "expert-003 of" not in caplog.text:
                await asyncio.sleep(0.01)
            await clients.until(runs.left)
        else:
            await clients.until(runs.joined)
            assert mixture.live.info.clusters == (0, 1, 2, 3)
        pin_file.unlink()
        await clients.until(runs.first)
        named = sorted(re.findall(r'ddm_weights_step{network="(.+)"}', mixture._meters.page().decode()))
        assert named == ["expert-000", "expert-001", "expert-002", "router"]
        await stop(mixture, *clients.tasks)

    with caplog.at_level(logging.WARNING, "ray.serve"):
        asyncio.run(asyncio.wait_for(serve(), SECONDS))
    if placement == "per-expert":
        assert "expert-003 of" in caplog.text and "name this run in Serve's configuration" in caplog.text


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_image_in_flight_is_finished_by_the_run_that_it_began_with(
    runs: Chain, images: Images, tmp_path: Path, placement: str
) -> None:
    pin_file = tmp_path / "pins.yaml"

    async def serve() -> None:
        mixture = await start(runs.first, placement, pin_file)

        async def on_stop(unfinished: SampleResult) -> None:
            pin(pin_file, runs.left)
            while mixture.live.version.run.url != runs.left.url:
                await asyncio.sleep(0.01)

        for strategy in STRATEGIES:
            older = await mixture.live.sample(request_of(strategy), stops=[3], on_stop=on_stop)
            newer = await mixture.live.sample(request_of(strategy))
            assert maker(images, strategy, older) == runs.first.url
            assert maker(images, strategy, newer) == runs.left.url and newer.result.clusters == (0, 2)
            pin_file.unlink()
            while mixture.live.version.run.url != runs.first.url:
                await asyncio.sleep(0.01)
        await stop(mixture)

    asyncio.run(asyncio.wait_for(serve(), SECONDS))


@pytest.mark.parametrize("placement", ["colocated", "multiplexed"])
def test_what_both_runs_have_is_loaded_once(
    runs: Chain, tmp_path: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(runs.first.store.read(next(key for key in _weights_of(runs.first) if "experts/002" in key)))
    pin_file = tmp_path / "pins.yaml"

    async def serve() -> None:
        mixture = await start(runs.first, placement, pin_file)
        meter = StoreMeter(monkeypatch)
        pin(pin_file, runs.left)
        while mixture.live.version.run.url != runs.left.url:
            await asyncio.sleep(0.01)
        router = sum(len(runs.left.store.read(key)) for key in _weights_of(runs.left) if "router" in key)
        assert meter.read - router < router + size / 2, "the router, and no expert"
        await stop(mixture)

    asyncio.run(asyncio.wait_for(serve(), SECONDS))


def _weights_of(run: Run) -> Iterator[str]:
    return (key for key in run.store.sizes("") if key.endswith("ema.safetensors"))


def refused(run: Run, pin_file: Path, text: str) -> str:
    """The message on a pin file."""
    pin_file.write_text(text)
    with pytest.raises(ConfigError) as error:
        Versions(run, str(pin_file)).newest()
    assert "\n" not in str(error.value) and str(error.value).startswith(f"pin_file {pin_file}: ")
    return str(error.value)


def test_a_run_that_cant_take_the_place_is_told(runs: Chain, tmp_path: Path) -> None:
    tell = partial(refused, runs.first, tmp_path / "pins.yaml")
    others = {
        "larger": ("data.image_size=16", "its data.image_size is 16, not 8"),
        "fewer": ("data.num_classes=1", "its data.class_names is ('0',), not ('0', '1',"),
        "alike": ("name=alike", "has no finished partition yet"),
    }
    for name, (setting, words) in others.items():
        url = Run.create(str(tmp_path / name), load_recipe("tiny", (setting,))).url
        assert words in tell(f"run: {url}\n") and url in tell(f"run: {url}\n")
    assert "is not a run: it has no run.json" in tell(f"run: {tmp_path}/nowhere\n")
    assert "run: runs/more is no absolute path or URI of a run" in tell("run: runs/more\n")
    assert "run: 5 is no absolute path" in tell("run: 5\n")
    assert "'expert-001' isn't one of expert-000, expert-002, router" in tell(f"run: {runs.left.url}\nexpert-001: 5\n")
    assert "expert-002: 400" in tell(f"run: {runs.left.url}\nexpert-002: soon\n")


def _made_by(run: Run, folder: Path, encoder: str) -> Run:
    """A copy of a run of which the partition knows the fingerprint of a text encoder."""
    shutil.copytree(run.url, folder)
    copy = Run.open(str(folder))
    manifest = copy.require(PARTITION)
    info = PartitionInfo.of(manifest).model_copy(update={"networks": {"text encoder": encoder}})
    copy.store.delete_one(f"{PARTITION}/{NAME}")
    copy.commit_records(PARTITION, dict(manifest.files), info)
    return copy


def test_another_text_encoder_cant_take_the_place(runs: Chain, tmp_path: Path) -> None:
    """Texts and latents are of the networks that made the rows: the server has those of its own run."""
    made = [_made_by(runs.first, tmp_path / each, each) for each in ("one", "two")]
    require_fits(runs.first, made[0])
    with pytest.raises(ConfigError, match="another text encoder made its rows"):
        require_fits(*made)


def test_what_a_writer_leaves_when_it_is_killed_is_the_old_pin_or_the_new(runs: Chain, tmp_path: Path) -> None:
    """After each byte. `first` is a run, too, and its URL begins like another one's."""
    longer = f"{runs.first.url}-longer"
    shutil.copytree(runs.first.url, longer)
    pin_file = tmp_path / "pins.yaml"
    pin(pin_file, runs.left)
    versions = Versions(runs.first, str(pin_file))
    assert versions.newest().run.url == runs.left.url
    text = f"run: {longer}\n"
    for length in range(len(text)):
        refused(runs.first, pin_file, text[:length])
    pin_file.write_text(text)
    assert versions.newest().run.url == longer
    pin_file.unlink()
    assert versions.newest().run.url == runs.first.url


def test_while_a_pin_is_refused_the_server_goes_on(runs: Chain, images: Images, tmp_path: Path, caplog: Any) -> None:
    pin_file = tmp_path / "pins.yaml"

    async def serve() -> None:
        pin(pin_file, runs.left)
        mixture = await start(runs.first, "colocated", pin_file)
        clients = Clients(mixture, images)
        for text, words in (("", "is empty"), ("run: /nowhere\n", "is not a run"), ("run: 5", "no absolute path")):
            pin_file.write_text(text)
            while words not in caplog.text:
                await asyncio.sleep(0.01)
            await clients.until(runs.left)
        assert {url for _, url in clients.made} == {runs.left.url}
        pin(pin_file, runs.joined)
        await clients.until(runs.joined)
        await stop(mixture, *clients.tasks)

    with caplog.at_level(logging.WARNING, "ray.serve"):
        asyncio.run(asyncio.wait_for(serve(), SECONDS))
    assert "the weights that are served stay as they are" in caplog.text


def test_a_dense_network_stays_that_of_the_servers_run(runs: Chain, tmp_path: Path) -> None:
    pin(tmp_path / "pins.yaml", runs.left)
    version = Versions(runs.first, str(tmp_path / "pins.yaml"), "monolith").newest()
    assert version.run is runs.first and list(version.steps()) == ["monolith"]
