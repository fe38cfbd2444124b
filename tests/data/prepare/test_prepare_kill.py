"""SIGKILL in the middle of `prepare`: of the driver, of the node that embeds, of nothing but a race of two drivers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data.images import png
from ddm_ray.data.prepare.records import rows_store
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.data.sources.shapes import draw
from ddm_ray.placement import PreparePlacement
from ddm_ray.run.graph import ROWS
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run
from tests.conftest import ROOT, fresh_token
from tests.data.rows import commit_rows, read_artifact
from tests.data.s3 import BUCKET, s3_server, upload

pytestmark = pytest.mark.chaos

NUM_ROWS = 1500
CHUNK_ROWS = 25
# Two actors, the fewest that there may be: their start is most of what this costs.
FEW = PreparePlacement(embedders=1)
SHAPES = (
    f"data.source=shapes:{NUM_ROWS}",
    "data.class_names=[]",
    "data.num_classes=12",
    "data.channels=3",
    "data.image_size=16",
)

DRIVER = """
import os, signal, sys, time, ray
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.placement import PreparePlacement
from ddm_ray.run.run import Run
_, address, url, chunk_rows, deadly = sys.argv
def tell(fraction, note):
    if deadly in note:
        os.kill(os.getpid(), signal.SIGKILL)
aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": aws})
print(prepare(Run.open(url), tell, PreparePlacement(embedders=1), chunk_rows=int(chunk_rows)).content)
"""

# A head without CPUs, so that all work is on the node that is killed once its first part is recorded. The other one is
# there before, its CPUs taken until then: a node takes seconds to come, and far more where others come too. Who is dead
# refuses a health check at once; who is busy has long to answer.
NODE_DIES = """
import json, os, signal, sys, ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ddm_ray.data.prepare.records import rows_store
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.placement import PreparePlacement
from ddm_ray.run.graph import ROWS
from ddm_ray.run.run import Run
_, url, chunk_rows = sys.argv
run = Run.open(url)
quick = {"health_check_period_ms": 500, "health_check_timeout_ms": 30000, "health_check_failure_threshold": 3}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick})
ray.init(address=cluster.address, log_to_driver=False)  # while there is one node: a driver dies with its own
node, other = [cluster.add_node(num_cpus=2) for _ in range(2)]
class Holder:
    pass
there = NodeAffinitySchedulingStrategy(other.node_id, soft=False)
holder = ray.remote(num_cpus=2)(Holder).options(scheduling_strategy=there).remote()
ray.get(holder.__ray_ready__.remote())
killed = []
def tell(fraction, note):
    if " rows, " in note and not killed:
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        killed.append(len(rows_store(run, ROWS).finished_keys()))
        ray.kill(holder)
manifest = prepare(run, tell, PreparePlacement(embedders=1), chunk_rows=int(chunk_rows))
alive = sum(member["Alive"] for member in ray.nodes())
print(json.dumps({"content": manifest.content, "parts_before": killed[0], "alive": alive}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    run = commit_rows(tmp_path_factory.mktemp("undisturbed") / "run", SHAPES, CHUNK_ROWS)
    return run.require(ROWS)


@pytest.fixture
def shapes(tmp_path: Path) -> Run:
    return Run.create(str(tmp_path / "run"), load_recipe("tiny", SHAPES))


def start(script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    command, environment = [sys.executable, "-c", script, *map(str, arguments)], {**os.environ, **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def written(run: Run) -> dict[str, tuple[int, int]]:
    """Inode and time of all files that records of finished chunks name, and of these."""
    chunks = rows_store(run, ROWS)
    keys = chunks.finished_keys()
    names = [f"_parts/{key.record_name}" for key in keys]
    names += [name for record in KeptRecords.of(chunks) for name in record.files]
    stats = {name: os.stat(f"{run.url}/{ROWS}/{name}") for name in names}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def require_same(run: Run, undisturbed: Manifest) -> None:
    manifest = run.require(ROWS)
    assert (manifest.content, manifest.files, manifest.info) == (
        undisturbed.content,
        undisturbed.files,
        undisturbed.info,
    )
    ids = read_artifact(run, ROWS, ["id"])["id"].to_pylist()
    assert len(ids) == len(set(ids)) == NUM_ROWS
    assert {name for name in run.store.sizes(ROWS) if name.startswith("part-")} == manifest.files.keys()


def test_a_killed_driver_goes_on(ray_cluster: str, shapes: Run, undisturbed: Manifest) -> None:
    driver = start(DRIVER, ray_cluster, shapes.url, CHUNK_ROWS, " rows, ")
    _, errors = driver.communicate(timeout=120)
    assert driver.returncode == -signal.SIGKILL, errors
    before = written(shapes)
    assert 0 < len(before) < 2 * NUM_ROWS // CHUNK_ROWS
    prepare(shapes, placement=FEW, chunk_rows=CHUNK_ROWS)
    after = written(shapes)
    assert {name: after[name] for name in before} == before
    require_same(shapes, undisturbed)


def test_a_killed_node_costs_time_alone(shapes: Run, undisturbed: Manifest) -> None:
    driver = start(NODE_DIES, shapes.url, CHUNK_ROWS, **fresh_token())
    try:
        output, errors = driver.communicate(timeout=500)
    finally:
        driver.kill()
    assert driver.returncode == 0, errors[-3000:]
    printed = json.loads(next(line for line in output.splitlines() if line.startswith("{")))  # Ray prints there too
    assert 0 < printed["parts_before"] < NUM_ROWS // CHUNK_ROWS
    assert printed["alive"] == 2
    assert printed["content"] == undisturbed.content
    require_same(shapes, undisturbed)


def test_two_drivers_at_once_make_one_result(ray_cluster: str, shapes: Run, undisturbed: Manifest) -> None:
    rival = start(DRIVER, ray_cluster, shapes.url, CHUNK_ROWS, "never told")
    mine = prepare(shapes, placement=FEW, chunk_rows=CHUNK_ROWS)
    output, errors = rival.communicate(timeout=120)
    assert rival.returncode == 0, errors[-3000:]
    assert mine.content in output.splitlines()
    require_same(shapes, undisturbed)


def test_a_killed_driver_of_buckets_goes_on(ray_cluster: str, tmp_path: Path) -> None:
    """Source and run in a bucket; the result is that of the same images on a disk."""
    folder = tmp_path / "images"
    for index in range(120):
        pixels_HWC, family = draw(0, index)
        path = folder / f"family {family:02d}" / f"{index:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(pixels_HWC))
    expected = commit_rows(tmp_path / "run", (*SHAPES, f"data.source={folder}"), 4).require(ROWS)
    with s3_server(tmp_path / "s3.log"):
        settings = (*SHAPES, f"data.source={upload(folder, 'images')}")
        run = Run.create(f"s3://{BUCKET}/run", load_recipe("tiny", settings))
        killed = start(DRIVER, ray_cluster, run.url, 4, " rows, ")
        _, errors = killed.communicate(timeout=120)
        assert killed.returncode == -signal.SIGKILL, errors
        assert 0 < len(rows_store(run, ROWS).finished_keys()) < 30
        again = start(DRIVER, ray_cluster, run.url, 4, "never told")
        output, errors = again.communicate(timeout=120)
        assert again.returncode == 0, errors[-3000:]
        manifest = run.require(ROWS)
        assert manifest.content in output.splitlines()
        assert (manifest.content, manifest.files) == (expected.content, expected.files)
        assert len(set(read_artifact(run, ROWS, ["id"])["id"].to_pylist())) == manifest.info["rows"] == 120
