"""The start of a server as it shows: what replicas count, and how much they will."""

import pickle
import shutil
from pathlib import Path

import pytest

from ddm_ray.jobs.published import Weights
from ddm_ray.run.graph import ROUTER, expert
from ddm_ray.run.run import Run
from ddm_ray.sampling.buckets import bucket_sizes
from ddm_ray.sampling.run_models import mixture_info
from ddm_ray.serve.cluster import start
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.cluster.start import NETWORKS, SERVE, ReadyCount, expected, shown
from ddm_ray.serve.engine.computing import Computing, Networks, num_calls
from ddm_ray.serve.engine.versions import Version, Versions
from tests.conftest import wait_for

TWO = Version((Weights(expert(0), "w", 1, True), None, Weights(expert(2), "w", 1, True)), Weights(ROUTER, "w", 1, True))


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 3),
        ({"replicas": 2}, 6),
        ({"placement": "multiplexed"}, 3),
        ({"placement": "per-expert", "replicas": 2}, 7),  # the router in each of five processes
        ({"dense": "monolith"}, 4),
        ({"compile": True, "max_rows": 4}, 3 * len(bucket_sizes(8))),
    ],
)
def test_what_replicas_will_count(fields: dict[str, object], count: int) -> None:
    assert expected(ServeArgs(run="/r", **fields), TWO) == count
    assert expected(ServeArgs(run="/r"), Version(TWO.experts, None)) == 2


def test_each_network_counts_once_and_after_the_start_no_more(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    ready = ReadyCount(str(tmp_path / "start"))
    for name in ("experts/000", "router", "router", "router for 4 rows"):
        pickle.loads(pickle.dumps(ready))(name)
    assert ready.read() == 3
    shutil.rmtree(ready.folder)
    ready("router")
    assert ready.read() == 0 and not [*tmp_path.iterdir()]


def test_a_replica_s_networks_are_counted_as_they_are_loaded(tiny_run: Run, tmp_path: Path) -> None:
    ready, version = ReadyCount(str(tmp_path)), Versions(tiny_run).newest()
    computing = Computing(max_rows=2, on_ready=ready)
    networks = Networks(tiny_run, mixture_info(tiny_run), computing)
    for weights in (version.experts[0], version.router, version.router):
        assert weights
        networks.of(weights)
    assert ready.read() == 2 == num_calls(2, computing)
    assert computing == Computing(max_rows=2), "it is no setting of what is computed"


def test_the_count_is_shown_until_all_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "LOOK_SECONDS", 0.01)
    ready, seen = ReadyCount(str(tmp_path)), list[tuple[float, str]]()
    with shown(lambda share, note: seen.append((share, note)), ready, 2, compiles=False):
        assert seen == [(SERVE, "loading networks: 0 of 2")]
        ready("experts/000")
        wait_for(lambda: seen[-1] == (SERVE + (NETWORKS - SERVE) / 2, "loading networks: 1 of 2"), 10)
        ready("router")
        wait_for(lambda: seen[-1] == (NETWORKS, "loading networks: 2 of 2"), 10)
    with shown(lambda share, note: seen.append((share, note)), ready, None, compiles=True):
        assert seen[-1] == (SERVE, "compiling networks"), "of other machines nothing is counted"
