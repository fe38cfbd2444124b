"""Partition by Ray Data: the bytes that one process makes, on one node and on several, whatever is killed meanwhile."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError

from ddm_ray.data.partition import groups, ray_data, stage
from ddm_ray.data.partition.ray_data import RayPasses, require_room
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.sharded.ray_data import errors_of_ray
from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.run.graph import CENTROIDS, PARTITION, ROWS
from ddm_ray.run.run import Run
from tests.conftest import ROOT, fresh_token
from tests.data.groups import FOUR, rows, run_of
from tests.data.partitions import DeadlyFiles, DeadlyPlan, contents, copy_of
from tests.data.test_columns import damaged, run_of_large_rows

pytestmark = pytest.mark.integration

FILE_BYTES = 8_000  # files of some 70 rows
BALANCED = (*FOUR, "partition.max_share=0.3")

DRIVER = """
import os, signal, sys, ray
from ddm_ray.data.partition import groups, stage
from ddm_ray.data.partition.ray_data import RayPasses
from ddm_ray.run.run import Run
_, address, url, deadly, file_bytes = sys.argv
groups.FILE_BYTES = int(file_bytes)
def tell(fraction, note):
    if deadly in note:
        os.kill(os.getpid(), signal.SIGKILL)
ray.init(address=address, log_to_driver=False)
stage.partition(Run.open(url), tell, execute=RayPasses())
"""

# A head without CPUs; of two nodes the one that has written a file is killed, then another one comes.
NODE_DIES = """
import json, os, signal, sys, ray
from ray.cluster_utils import Cluster
from ddm_ray.data.partition import groups, stage
from ddm_ray.data.partition.ray_data import RayPasses
from ddm_ray.run.run import Run
_, url, file_bytes = sys.argv
groups.FILE_BYTES = int(file_bytes)
quick = {"health_check_period_ms": 500, "health_check_timeout_ms": 30000, "health_check_failure_threshold": 3}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick})
ray.init(address=cluster.address, log_to_driver=False)  # while there is one node: a driver dies with its own
def added():
    for _ in range(5):
        try:
            return cluster.add_node(num_cpus=1)
        except Exception:  # a raylet has 30 s to start, which is Ray's own limit
            pass
    raise SystemExit("a node gave up 5 times")
nodes = [added() for _ in range(3)]
killed = []
def tell(fraction, note):
    if " files" in note and not killed:
        os.kill(nodes[0].all_processes["raylet"][0].process.pid, signal.SIGKILL)
        killed.append(note)
stage.partition(Run.open(url), tell, execute=RayPasses())
print(json.dumps({"killed": killed, "alive": sum(member["Alive"] for member in ray.nodes())}))
ray.shutdown()
cluster.shutdown()
"""


def start(script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    command, environment = [sys.executable, "-c", script, *map(str, arguments)], {**os.environ, **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "FILE_BYTES", FILE_BYTES)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Balanced clusters, which are looked at twice: their rows are in parts of several nodes."""
    return run_of(str(tmp_path / "run"), rows(), *BALANCED, part_rows=100)


@pytest.fixture
def expected(run: Run, tmp_path: Path) -> dict[str, bytes]:
    """The files that one process makes of these rows."""
    copy = copy_of(run, tmp_path / "copy")
    partition(copy)
    return contents(copy)


def test_ray_data_and_one_process_make_the_same_files(ray_cluster: str, run: Run, expected: dict[str, bytes]) -> None:
    assert len(expected) > 30
    assert partition(run, execute=RayPasses()) == run.require(PARTITION)
    assert contents(run) == expected


@pytest.mark.chaos
def test_a_killed_driver_goes_on_with_the_missing_files(ray_cluster: str, run: Run, expected: dict[str, bytes]) -> None:
    driver = start(DRIVER, ray_cluster, run.url, " files", FILE_BYTES)
    _, errors = driver.communicate(timeout=400)
    assert driver.returncode == -signal.SIGKILL, errors[-3000:]
    assert not run.finished(PARTITION)
    folder = Path(run.url, PARTITION)
    before = {path: path.stat().st_ino for path in folder.rglob("*.parquet")}
    assert len(list(folder.glob("_files/*/*.json"))) > 0
    partition(run, execute=RayPasses())
    recorded = [path for path, inode in before.items() if path.stat().st_ino == inode]
    assert recorded, "what was recorded isn't written again"
    assert contents(run) == expected


@pytest.mark.chaos
def test_a_killed_node_costs_time_alone(run: Run, expected: dict[str, bytes]) -> None:
    driver = start(NODE_DIES, run.url, FILE_BYTES, **fresh_token())
    try:
        output, errors = driver.communicate(timeout=500)
    finally:
        driver.kill()
    assert driver.returncode == 0, errors[-3000:]
    printed = json.loads(next(line for line in output.splitlines() if line.startswith("{")))  # Ray prints there too
    assert printed["killed"] and printed["alive"] == 3
    assert contents(run) == expected


def test_a_damaged_part_is_one_line_and_leaves_no_shard(ray_cluster: str, tmp_path: Path) -> None:
    run = run_of_large_rows(str(tmp_path / "run"))
    name = damaged(run, "data")  # which no pass but the last one reads
    with pytest.raises(
        CorruptArtifact, match=f"^{run.url}/{ROWS}/{name}: checksum differs from its manifest's; mend [^\\n]*$"
    ):
        partition(run, execute=RayPasses())
    assert not [key for key in contents(run) if key.endswith("_MANIFEST.json") and not key.startswith("centroids/")]
    assert run.finished(CENTROIDS)


@pytest.mark.chaos
@pytest.mark.parametrize("deadly", [DeadlyPlan, DeadlyFiles])
def test_a_killed_worker_costs_time_alone(
    deadly: type[DeadlyPlan] | type[DeadlyFiles],
    ray_cluster: str,
    run: Run,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, flag = deadly.__mro__[1].__name__, str(tmp_path / "flag")

    def made(*args: Any) -> DeadlyPlan | DeadlyFiles:
        made = deadly(*args)
        made.flag = flag
        return made

    monkeypatch.setattr(stage, name, made)
    partition(run, execute=RayPasses())
    assert Path(flag).exists(), "a worker has died"
    assert contents(run) == expected


WITHOUT_CORES = """
import sys, ray
from ddm_ray.data.partition.ray_data import RayPasses
from ddm_ray.data.partition.stage import partition
from ddm_ray.errors import RayError
from ddm_ray.run.run import Run
ray.init(num_cpus=0, log_to_driver=False)
try:
    partition(Run.open(sys.argv[1]), execute=RayPasses())
except RayError as error:
    print(f"\\n{error}")
"""


@pytest.mark.chaos
def test_a_ray_without_cores_is_told_in_one_line(run: Run) -> None:
    driver = start(WITHOUT_CORES, run.url, **fresh_token())
    output, errors = driver.communicate(timeout=300)
    line = "this Ray has no core, and a task of partition takes one; start it with some, or add a node"
    assert line in output.splitlines(), output + errors[-3000:]
    assert not contents(run)


@pytest.mark.chaos
def test_a_disk_that_cannot_hold_the_rows_is_refused_before_they_move(
    ray_cluster: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = shutil.disk_usage(tmp_path).free
    require_room(free // 2 + 10**9, 10**9, str(tmp_path))
    line = f"^{tmp_path}: [0-9.]+ [GT]B are free, and 500 PB of rows on their way don't fit into memory"
    with pytest.raises(StorageError, match=line):
        require_room(5 * 10**17 + 10**9, 10**9, str(tmp_path))
    monkeypatch.setattr(ray_data, "_bytes_of", lambda rows: 10**18)
    with pytest.raises(StorageError, match="B are free"):
        partition(run, execute=RayPasses(spills_below=str(tmp_path)))
    assert not any("shards" in key for key in contents(run))


@pytest.mark.chaos
def test_a_partition_on_which_nothing_ends_says_what_to_look_at(
    ray_cluster: str, run: Run, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_data, "STALL_SECONDS", 0.001)
    notes: list[str] = []
    partition(run, lambda _, note: notes.append(note), execute=RayPasses())
    assert any(ray_data.STALLED in note for note in notes)
    assert contents(run) == expected


@pytest.mark.parametrize("kind", [OutOfDiskError, ObjectStoreFullError])
@pytest.mark.parametrize("in_task", [True, False])
def test_a_machine_without_room_is_told_in_one_line(kind: type[Exception], in_task: bool) -> None:
    """As Ray raises it: in the driver, or in a task whose results it can't keep."""
    error = kind("object store\nhas no room")
    raised = RayTaskError("task", "Traceback\nof many lines", error) if in_task else error
    line = "^s3://lab/run: a machine of this Ray has no room for rows on their way; free some space where [^\\n]*$"
    with pytest.raises(StorageError, match=line) as caught, errors_of_ray("s3://lab/run"):
        raise raised
    assert not caught.value.passes
