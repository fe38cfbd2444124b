"""Ray's and DeepSpeed's private names that are built upon: a version that has moved one is told of by that name."""

import mmap
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import ray

from ddm_ray.errors import RayError
from ddm_ray.ray_internals import INTERNALS, Internal

pytestmark = pytest.mark.contract

PACKAGE = Path(__file__).parent.parent / "ddm_ray"
CORE = "core"
"""Stands for a module where Ray's C++ programs read a setting."""


@dataclass(frozen=True)
class Setting:
    """An environment variable, or an option, that `module` reads. `without` says what happens if it is renamed."""

    name: str
    module: str
    without: str


_TRAIN_CONSTANTS, _SERVE_CONSTANTS = "ray.train.v2._internal.constants", "ray.serve._private.constants"
_COUNTERS = "Ray serves its counters on all addresses, without a token"
SETTINGS = (
    Setting("RAY_ADDRESS", "ray._private.ray_constants", "a command starts a private Ray"),
    Setting("RAY_API_SERVER_ADDRESS", "ray._private.ray_constants", "a script's job goes to another cluster"),
    Setting("RAY_AUTH_MODE", CORE, "a Ray answers requests without a token"),
    Setting("RAY_AUTH_TOKEN", CORE, "a Ray doesn't start"),
    Setting("RAY_AUTH_TOKEN_PATH", CORE, "a Ray doesn't start"),
    Setting("RAY_enable_metrics_collection", CORE, _COUNTERS),
    Setting("DASHBOARD_METRIC_PORT", "ray.dashboard.consts", _COUNTERS),
    Setting("AUTOSCALER_METRIC_PORT", "ray.autoscaler._private.constants", _COUNTERS),
    Setting("RAY_USAGE_STATS_ENABLED", "ray._common.usage.usage_constants", "usage is reported"),
    Setting("_temp_dir", "ray._private.worker", "other users can read a private Ray's files"),
    Setting("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "ray._private.accelerators.accelerator", "drivers see no GPU"),
    Setting("RAY_JOB_CONFIG_JSON_ENV_VAR", "ray._private.runtime_env.constants", "a relative RUN is accepted in a job"),
    Setting("RAY_JOB_STOP_WAIT_TIME_S", "ray.dashboard.modules.job.job_supervisor", "a stopped job saves no state"),
    Setting("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "ray._private.ray_constants", "a stopped node saves no state"),
    Setting("RAY_HEAD_IP", "ray.autoscaler._private.util", "a cluster of Ray's launcher doesn't start"),
    Setting("RAY_enable_autoscaler_v2", CORE, "a cluster of Ray's SSH launcher lacks one machine"),
    Setting("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", _TRAIN_CONSTANTS, "losses are noticed later"),
    Setting("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "ray.train.constants", "workers wait 30 s after one is lost"),
    Setting("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", _TRAIN_CONSTANTS, "a private Ray's jobs start seconds later"),
    Setting("RAY_worker_niceness", CORE, "replicas run at low priority, and requests miss deadlines"),
    Setting("RAY_worker_maximum_startup_concurrency", CORE, "Ray warns again and again of many small jobs"),
    Setting("RAY_SERVE_ENABLE_DIRECT_INGRESS", _SERVE_CONSTANTS, "a request takes 12 ms more, on two cores"),
    Setting("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", _SERVE_CONSTANTS, "a server that ends stays for 30 s"),
)


@pytest.mark.parametrize("name", INTERNALS)
def test_it_is_where_it_was(name: str) -> None:
    internal = INTERNALS[name]
    assert internal.lacks() == [], f"{internal.module}.{internal.name} stands for {internal.stands_for}"


def test_one_that_has_moved_is_named() -> None:
    with pytest.raises(RayError, match=r"^ray \S+ has no ray\._raylet\.Gone; install the version in constraints\.txt"):
        Internal("ray._raylet", "Gone", "nothing").get()
    with pytest.raises(RayError, match=r"has no ray\.gone\.Config"):
        Internal("ray.gone", "Config", "nothing").lacks()
    trainer = INTERNALS["TRAINER"]
    assert Internal(trainer.module, trainer.name, "nothing", ("after_the_end",)).lacks() == ["after_the_end"]


def is_read(setting: Setting) -> bool:
    """Whether what reads a setting still has its name: in the text of a module, or among a program's strings."""
    package = Path(ray.__file__).parent
    if setting.module != CORE:
        try:
            spec = find_spec(setting.module)
        except ModuleNotFoundError:
            return False
        return bool(spec and spec.origin and re.search(rf"\b{setting.name}\b", Path(spec.origin).read_text()))
    name = setting.name if setting.name.startswith("RAY_AUTH") else setting.name.removeprefix("RAY_")
    for program in ("core/src/ray/gcs/gcs_server", "core/src/ray/raylet/raylet"):
        with (package / program).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if re.search(rb"(?<![\w])%s(?![A-Z_])" % name.encode(), data):
                return True
    return False


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_is_still_read(setting: Setting) -> None:
    assert is_read(setting), f"{setting.module} has no {setting.name}: {setting.without}"


def test_a_setting_that_has_moved_is_named() -> None:
    for module in (CORE, "ray._private.worker", "ray.gone.worker"):
        assert not is_read(Setting("RAY_of_another_time", module, "nothing"))


def test_all_settings_of_ray_are_in_the_table() -> None:
    known = {setting.name for setting in SETTINGS}
    used = set[str]()
    for folder in (PACKAGE, *(PACKAGE.parent / name for name in ("cluster_configs", "serving", "jobs"))):
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".sh", ".yaml", ".sbatch") and path.name != "ray_internals.py":
                used |= set(
                    re.findall(r"\b(?:RAY_\w+|[A-Z]+_METRIC_PORT|_system_config|_temp_dir)\b", path.read_text())
                )
    assert not used - known - {"RAY_"}  # the beginning of all: an island has none of its parent's
    assert not {name for name in known - used if name.startswith("RAY_")}


def test_the_names_and_settings_of_ray_are_few() -> None:
    names = [internal for internal in INTERNALS.values() if internal.module.startswith("ray.")]
    in_files = {"RAY_HEAD_IP", "RAY_enable_autoscaler_v2", "RAY_API_SERVER_ADDRESS"}  # of cluster_configs alone
    assert len(names) <= 10 and len({setting.name for setting in SETTINGS} - in_files) <= 20


def test_no_other_file_has_any() -> None:
    private = re.compile(r"\bray\.(\w+\.)*_(?!_)\w+|__internal_head__|AutoscalingCoordinator\b")
    files = [path for path in PACKAGE.rglob("*.py") if private.search(path.read_text())]
    assert [path.name for path in files] == ["ray_internals.py"]
