"""Replicas of an expert with several versions of its weights, without Ray."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import mixture_info
from ddm_ray.sampling.serialization import pack, unpack
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.cluster import expert_replica
from ddm_ray.serve.engine.local_runner import local_engine
from ddm_ray.serve.engine.versions import Version
from tests.serve.conftest import milestone, replica_of, unfinished
from tests.serve.engine.test_versions import OF_ONE, SECOND, chosen, sampled


@pytest.fixture
def run(tiny_run: Run, tmp_path: Path) -> Run:
    """A run whose expert 1 still trains, and has published nothing yet."""
    return unfinished(tiny_run, tmp_path / "run")


def asked(run: Run) -> tuple[bytes, None, None]:
    """The whole way of one image, for a replica."""
    return pack(start(OF_ONE, mixture_info(run))), None, None


def test_a_replica_has_two_versions_at_a_time_and_forgets_the_older(run: Run) -> None:
    older = milestone(run, SECOND, 10)
    pairs = [chosen(run).pair(1)]
    milestone(run, SECOND, 20, 1.5)
    pairs.append(chosen(run).pair(1))
    assert pairs[0] == (older, pairs[1].router, run.url) != pairs[1]

    async def sample() -> list[Tensor]:
        replica = await replica_of(run, 1)
        assert list(replica._engines) == pairs[1:]
        info, images = mixture_info(run), []
        for pair in pairs:
            packed, _, _ = await replica.run(*asked(run), pair)
            images.append(unpack(packed, info).result().images_BCHW)
        replica.check_health()
        assert len(replica._engines) == 2
        replica._used_at[pairs[0]] -= 1000.0
        replica.check_health()
        assert list(replica._engines) == pairs[1:]
        return images

    first, second = asyncio.run(sample())
    for image, pair in ((first, pairs[0]), (second, pairs[1])):
        assert torch.allclose(image, sampled(run, Version.of_pair(run, 1, 2, pair), OF_ONE), atol=1e-5)
    assert (first - second).abs().max() > 0.05


def test_a_replica_without_weights_waits_for_them(run: Run) -> None:
    async def serve() -> list[object]:
        replica = await replica_of(run, 1)
        replica.check_health()
        before = list(replica._engines)
        await asyncio.to_thread(milestone, run, SECOND, 10)
        await replica.load(chosen(run).pair(1))
        return [before, len(replica._engines)]

    assert asyncio.run(serve()) == [[], 1]


def test_requests_dont_wait_while_a_replica_loads_newer_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    milestone(run, SECOND, 10)
    older = chosen(run).pair(1)

    async def serve() -> None:
        replica = await replica_of(run, 1)
        await asyncio.to_thread(milestone, run, SECOND, 20, 1.5)
        loading, go_on = threading.Event(), threading.Event()

        def slow(*parts: object) -> object:
            loading.set()
            assert go_on.wait(60)
            return local_engine(*parts)  # type: ignore[arg-type]

        monkeypatch.setattr(expert_replica, "local_engine", slow)
        newer = asyncio.ensure_future(replica.load(chosen(run).pair(1)))
        assert await asyncio.to_thread(loading.wait, 60)
        try:
            await asyncio.wait_for(replica.run(*asked(run), older), 60)
            replica.check_health()
            assert not newer.done()
        finally:
            go_on.set()
        await newer
        assert len(replica._engines) == 2

    asyncio.run(serve())


def test_versions_that_nobody_asked_for_are_dropped(run: Run) -> None:
    async def serve() -> None:
        milestone(run, SECOND, 10)
        replica = await replica_of(run, 1)
        for step in (20, 30, 40):
            await asyncio.to_thread(milestone, run, SECOND, step)
            await replica.load(chosen(run).pair(1))
        replica.check_health()
        assert [pair.expert.step for pair in replica._engines if pair.expert is not None] == [30, 40]

    asyncio.run(serve())


def test_pins_that_cant_be_met_stop_no_replica(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each call says which weights it wants."""
    milestone(run, SECOND, 10)
    (tmp_path / "pins.yaml").write_text("expert-000: 7")

    async def serve() -> int:
        replica = await replica_of(run, 1, str(tmp_path / "pins.yaml"))
        await replica.run(*asked(run), chosen(run).pair(1))
        return len(replica._engines)

    assert asyncio.run(serve()) == 1
    assert "no weights of step 7" in caplog.text or "has no published weights of step 7" in caplog.text
