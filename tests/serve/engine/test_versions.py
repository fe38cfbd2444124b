"""Which published weights are served, and requests that keep theirs while newer ones go live. No Ray."""

import asyncio
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError, StorageError
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.published import Weights
from ddm_ray.run.graph import expert
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import mixture_info
from ddm_ray.serve.engine.computing import Computing, Networks
from ddm_ray.serve.engine.live_sampler import LiveSampler, follow
from ddm_ray.serve.engine.local_runner import LocalRunner, local_engine, multiplexed_engines
from ddm_ray.serve.engine.segments import Sampled, SegmentSampler
from ddm_ray.serve.engine.versions import Version, Versions
from tests.published import publish_weights
from tests.serve.conftest import milestone, unfinished
from tests.store_meter import StoreMeter

pytestmark = pytest.mark.contract

REQUEST = SampleRequest((3, 4), torch.tensor([1, 7]), SamplingSettings(strategy="full", steps=5))
OF_ONE = replace(REQUEST, settings=SamplingSettings(strategy="oracle", steps=5), cluster_B=torch.tensor([1, 1]))
FIRST, SECOND = expert(0), expert(1)


@pytest.fixture
def run(tiny_run: Run, tmp_path: Path) -> Run:
    """A run whose expert 1 still trains, and has published nothing yet."""
    return unfinished(tiny_run, tmp_path / "run")


def networks_of(run: Run) -> Networks:
    return Networks(run.config.data, mixture_info(run), Computing(max_rows=8))


def damage(run: Run, weights: Weights) -> None:
    key = f"{weights.artifact}/{weights.prefix}/ema.safetensors"
    data = bytearray(run.store.read(key))
    data[-1] ^= 1
    run.store.write(key, bytes(data))


def chosen(run: Run, pin_file: str | None = None) -> Version:
    return Versions(run, pin_file).newest()


def test_the_newest_weights_of_each_network_are_served(run: Run) -> None:
    assert chosen(run).steps()["expert-001"] is None
    milestone(run, SECOND, 20)
    milestone(run, SECOND, 10)  # of a later attempt, which began again before that
    version = chosen(run)
    assert version.steps() == {
        "expert-000": {"step": 300, "final": True},
        "expert-001": {"step": 20, "final": False},
        "router": {"step": 300, "final": True},
    }
    assert not Versions(run).settled


def test_a_look_reads_nothing_of_jobs_that_have_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many experts most may have, long before the last does."""
    versions = Versions(run)
    assert versions.newest().experts[1] is None
    meter = StoreMeter(monkeypatch)
    assert versions.newest().experts[1] is None
    assert meter.requests == {"list": 1} and not any(FIRST in name for name in meter.listed)
    newer = milestone(run, SECOND, 20)
    assert versions.newest().experts[1] == newer


def test_ended_weights_that_could_not_be_served_are_served_once_they_are_mended(run: Run) -> None:
    weights, networks, versions = Weights.finished(run, FIRST), networks_of(run), Versions(run)
    milestone(run, SECOND, 20)
    key = f"{FIRST}/{weights.prefix}/ema.safetensors"
    sound = run.store.read(key)
    damage(run, weights)

    def look() -> Version:
        return asyncio.run(versions.loadable(lambda *parts: load_all(networks, *parts)))

    assert look().experts[0] is None
    run.store.write(key, sound)
    mended = milestone(run, FIRST, 310)
    run.store.delete_one(f"{FIRST}/{NAME}")  # its training goes on, to another end
    assert look().experts[0] == mended


def test_of_one_step_the_later_attempts_weights_count(run: Run) -> None:
    milestone(run, SECOND, 20)
    assert chosen(run).experts[1] != milestone(run, SECOND, 20) == chosen(run).experts[1]


def test_the_end_of_a_job_makes_no_other_version_of_its_last_milestone(tiny_run: Run, run: Run) -> None:
    versions = Versions(tiny_run)
    version = versions.newest()
    assert versions.settled and all(weights.final for weights in version)
    shutil.copytree(f"{tiny_run.url}/{SECOND}", f"{run.url}/{SECOND}")
    manifest = run.store.read(f"{SECOND}/{NAME}")
    run.store.delete_one(f"{SECOND}/{NAME}")
    before = chosen(run)
    assert before.experts[1] is not None and not before.experts[1].final
    run.store.write(f"{SECOND}/{NAME}", manifest)
    after = chosen(run)
    assert after.experts[1] is not None and after.experts[1].final
    assert before == after


def test_pins_choose_older_weights_and_back(run: Run, tmp_path: Path) -> None:
    pin_file = tmp_path / "pins.yaml"
    versions = Versions(run, str(pin_file))
    older, newer = milestone(run, SECOND, 10), milestone(run, SECOND, 20, 1.5)
    assert versions.newest().experts[1] == newer
    pin_file.write_text("expert-001: 10\n")
    assert versions.newest().experts[1] == older
    pin_file.unlink()
    assert versions.newest().experts[1] == newer and not versions.settled


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("expert-001: 30", "experts/001 has no published weights of step 30; it has 10, 20"),
        ("expert-009: 30", "'expert-009' isn't one of expert-000, expert-001, router"),
        ("expert-001: soon", "write lines such as `expert-002: 400`"),
        ("a: [", "write lines such as"),
        ("[" * 5000, "write lines such as"),
        ("#" * 70_000, "more than 65536 bytes"),
    ],
)
def test_pins_that_cant_be_met_are_told(run: Run, tmp_path: Path, text: str, words: str) -> None:
    for step in (10, 20):
        milestone(run, SECOND, step)
    (tmp_path / "pins.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        chosen(run, str(tmp_path / "pins.yaml"))
    assert "pins.yaml" in str(error.value) and "\n" not in str(error.value)


async def load_all(networks: Networks, version: Version, weights: Weights) -> bool:
    networks.of(weights, version.run)
    return True


def loadable(versions: Versions, run: Run) -> Version:
    networks = networks_of(run)
    return asyncio.run(versions.loadable(lambda *parts: load_all(networks, *parts)))


def test_damaged_weights_of_a_job_that_goes_on_give_way_to_older_ones(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = milestone(run, SECOND, 10), milestone(run, SECOND, 20)
    damage(run, newer)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert loadable(Versions(run), run).experts[1] == older
    assert "experts/001 of step 20 isn't served" in caplog.text and "checksum differs" in caplog.text
    damage(run, older)
    assert loadable(Versions(run), run).experts[1] is None


def test_damaged_weights_of_a_jobs_end_are_an_error_at_first_and_later_give_way(run: Run) -> None:
    damage(run, Weights.finished(run, FIRST))
    parts = {"ema.safetensors": b"", "model.json": b"{}"}
    publish_weights(claim(run.store, SECOND), 10, run.identity(SECOND), parts)
    networks, versions = networks_of(run), Versions(run)

    async def load(version: Version, weights: Weights) -> bool:
        return weights.artifact == SECOND or await load_all(networks, version, weights)

    with pytest.raises(CorruptArtifact, match=r"experts/000.*checksum differs"):
        asyncio.run(versions.loadable(load, strict=True))
    version = asyncio.run(versions.loadable(load))
    assert version.experts[0] is None and version.experts[1] is not None
    assert version.experts[1].step == 10


def test_weights_of_another_configuration_arent_served(run: Run, tmp_path: Path) -> None:
    weights = milestone(run, SECOND, 10)
    key = f"{SECOND}/{weights.prefix}/{NAME}"
    other = Run.create(str(tmp_path / "other"), run.config.model_copy(update={"flow": run.config.flow}))
    identity = other.identity(SECOND)
    changed = replace(identity, fields={**identity.fields, "flow": {**identity.fields["flow"], "shift": 7.0}})
    parts = {"ema.safetensors": b"", "model.json": b"{}"}
    publish_weights(claim(run.store, SECOND), 20, changed, parts)
    assert run.store.exists(key) and loadable(Versions(run), run).experts[1] == weights
    with pytest.raises(DriftError, match=r"flow\.shift"):
        Weights(SECOND, chosen(run).experts[1].prefix, 20, final=False).read(run, {"model.json": 2**20})


def test_of_a_newer_version_only_the_experts_that_differ_come_to_host_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each publication of one of hundreds would read all of them again, and hold them twice."""
    info, networks = mixture_info(run), Networks(run.config.data, mixture_info(run), Computing(max_rows=8, resident=2))
    milestone(run, SECOND, 10)
    multiplexed_engines(info, chosen(run), networks, run.config.data).close()
    before, newer = networks.packed, milestone(run, SECOND, 20, 1.5)
    newest, meter = chosen(run), StoreMeter(monkeypatch)
    engines = multiplexed_engines(info, newest, networks, run.config.data)
    try:
        assert meter.requests == {"get": 4}  # its manifest, that of its shard, and two files
        assert networks.packed.keys() == set(newest.experts) and newer in newest.experts
        assert networks.packed[newest.experts[0]] is before[newest.experts[0]]
        of_expert = [LocalRunner(engine) for engine in engines.of_expert]
        images = asyncio.run(SegmentSampler(info, of_expert, LocalRunner(engines.mixing)).sample(REQUEST)).result
        assert torch.allclose(images.images_BCHW, sampled(run, newest), atol=1e-5)
    finally:
        engines.close()


def sampled(run: Run, version: Version, request: SampleRequest = REQUEST) -> Tensor:
    """The images of a version by its networks, one call after the other."""
    networks = networks_of(run)
    experts = [None if weights is None else networks.of(weights, run) for weights in version.experts]
    router = None if version.router is None else networks.of(version.router, run)
    return driver.sample(request, mixture_info(run), experts, router).images_BCHW


def live_sampler(run: Run, version: Version) -> LiveSampler:
    return LiveSampler(*parts(run, version))


def parts(run: Run, version: Version) -> tuple[Version, SegmentSampler, object, SamplingSettings]:
    engine = local_engine(mixture_info(run), version, [0, 1], networks_of(run), run.config.data)
    runners = [None if weights is None else LocalRunner(engine) for weights in version.experts]
    return version, SegmentSampler(mixture_info(run), runners, LocalRunner(engine)), engine, run.config.sample


def test_an_expert_without_weights_is_left_out_and_said(run: Run) -> None:
    live = live_sampler(run, chosen(run))
    try:
        answer = asyncio.run(live.sample(REQUEST))
    finally:
        live.engine.close()
    assert answer.away == {1}
    assert torch.allclose(answer.result.images_BCHW, sampled(run, chosen(run)), atol=1e-5)


def test_a_request_keeps_the_weights_that_it_began_with(run: Run) -> None:
    milestone(run, SECOND, 10)
    before = chosen(run)
    milestone(run, SECOND, 20, 1.5)
    after = chosen(run)

    async def sample() -> tuple[Sampled, Sampled, list[bool]]:
        live, alive = live_sampler(run, before), []
        engine, reached = live.engine, asyncio.Event()

        async def on_stop(images_BCHW: Tensor) -> None:
            if not reached.is_set():
                live.replace(*parts(run, after))
                alive.append(engine._thread.is_alive())
                newer.append(await live.sample(REQUEST))
                reached.set()

        newer = list[Sampled]()
        older = await live.sample(REQUEST, stops=[2], on_stop=on_stop)
        await asyncio.to_thread(engine._thread.join, 60)
        alive.append(engine._thread.is_alive())
        live.engine.close()
        return older, newer[0], alive

    older, newer, alive = asyncio.run(sample())
    assert alive == [True, False]
    assert torch.allclose(older.result.images_BCHW, sampled(run, before), atol=1e-5)
    assert torch.allclose(newer.result.images_BCHW, sampled(run, after), atol=1e-5)
    assert (older.result.images_BCHW - newer.result.images_BCHW).abs().max() > 0.05


def test_newer_weights_go_live_as_they_are_published(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def serve() -> list[Version]:
        versions, networks, seen = Versions(run), networks_of(run), list[Version]()
        live = live_sampler(run, versions.newest())

        async def put(version: Version) -> None:
            seen.append(version)
            await asyncio.to_thread(lambda: live.replace(*parts(run, version)))

        async def publish_more() -> None:
            for step in (10, 20):
                weights = await asyncio.to_thread(milestone, run, SECOND, step)
                while live.version.experts[1] != weights:
                    await asyncio.sleep(0.01)
            junk = {"ema.safetensors": b"junk", "model.json": b"{}"}
            publish_weights(claim(run.store, SECOND), 30, run.identity(SECOND), junk)
            while "step 30 isn't served" not in caplog.text:
                await asyncio.sleep(0.01)

        following = asyncio.ensure_future(follow(versions, live, lambda *each: load_all(networks, *each), put, 0.01))
        async with asyncio.timeout(60):
            await publish_more()
        following.cancel()
        live.engine.close()
        return seen

    steps = [version.steps()["expert-001"] for version in asyncio.run(serve())]
    assert steps == [{"step": 10, "final": False}, {"step": 20, "final": False}]


def test_a_look_that_fails_is_followed_by_another(tiny_run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Even if all that was seen is final, and whatever it was that failed."""
    failures, forgotten = iter([MemoryError("no room"), StorageError("no answer")]), list[int]()

    async def serve() -> Version:
        versions, networks = Versions(tiny_run), networks_of(tiny_run)
        newest = Versions(tiny_run).newest()
        live = live_sampler(tiny_run, Version(tiny_run, (newest.experts[0], None), newest.router))

        async def load(version: Version, weights: Weights) -> bool:
            for error in failures:
                raise error
            return await load_all(networks, version, weights)

        async def put(version: Version) -> None:
            await asyncio.to_thread(lambda: live.replace(*parts(tiny_run, version)))

        followed = follow(versions, live, load, put, 0.01, lambda: forgotten.append(1))
        await asyncio.wait_for(followed, 60)
        live.engine.close()
        return live.version

    assert asyncio.run(serve()) == Versions(tiny_run).newest()
    assert len(forgotten) == 2 and "no room" in caplog.text and "no answer" in caplog.text
