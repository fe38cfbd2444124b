"""Private names of Ray and DeepSpeed that this package uses, each with the reason.

They are those of Ray 2.59 and 2.60 and of DeepSpeed 0.19. A module is imported only when its object is used.
`tests/test_ray_internals.py` finds what another version has moved: these objects, and variables and options that it
would silently ignore.
"""

import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

from ddm_ray.errors import RayError

_CALLBACKS = "ray.train.v2._internal.callbacks"


@dataclass(frozen=True)
class Internal:
    """The object `name` of a module. `uses`: the methods, fields, parameters or texts of it that we rely on."""

    module: str
    name: str
    stands_for: str
    uses: tuple[str, ...] = ()

    def get(self) -> Any:
        """The object. Raises RayError if the installed library doesn't have it."""
        try:
            return attrgetter(self.name)(import_module(self.module))
        except (ImportError, AttributeError):
            library = self.module.partition(".")[0]
            name = f"{library} {import_module(library).__version__}"
            raise RayError(f"{name} has no {self.module}.{self.name}; install the version in constraints.txt") from None

    def lacks(self) -> list[str]:
        """Names of `uses` that the object no longer has. Raises RayError if the object itself is gone."""
        ray_object = self.get()
        missing = [use for use in self.uses if not hasattr(ray_object, use)]
        if not missing:
            return []
        classes = ray_object.__mro__[:-1] if inspect.isclass(ray_object) else (ray_object,)
        source = "".join(inspect.getsource(each) for each in classes)
        return [use for use in missing if not re.search(rf"(?<!\w){re.escape(use)}(?!\w)", source)]


TRAINER = Internal(
    "ray.train.torch",
    "TorchTrainer",
    "a trainer without the two callbacks below, and a name for what it reserves",
    ("_create_default_callbacks", "train_run_context"),
)
DATASETS_CALLBACK = Internal(
    f"{_CALLBACKS}.datasets", "DatasetsCallback", "a start without an actor that manages no data sets"
)
CLEANER_CALLBACK = Internal(
    f"{_CALLBACKS}.placement_group_callback",
    "PlacementGroupCleanerCallback",
    "a start without an actor that takes a living controller for dead if a busy state API doesn't list it",
)
ERRORS_PRINTED = Internal(
    "ray._private.worker",
    "_worker_logs_enabled",
    "an option of ray.init that keeps it from printing a paragraph of guesses for each lost worker",
)
COORDINATOR = Internal(
    "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator",
    "_AutoscalingCoordinatorActor",
    "a reservation that ends with the controller that made it, in place of one of 180 s",
    ("cancel_request",),
)
COORDINATOR_NAME = "AutoscalingCoordinator"
CONFIG = Internal("ray._raylet", "Config", "a second ray.init that reads a changed environment", ("initialize",))
TOKEN_LOADER = Internal(
    "ray._raylet", "AuthenticationTokenLoader", "ray.init with a token", ("instance", "reset_cache")
)
SERVE_CLIENT = Internal(
    "ray.serve.context",
    "_get_global_client",
    "an API for the addresses of replicas; Serve's REST API has them, but needs a dashboard",
)
SERVE_CLIENT_FIELDS = Internal("ray.serve._private.client", "ServeControllerClient", "as above", ("_controller",))
SERVE_CONTROLLER = Internal(
    "ray.serve._private.controller", "ServeController", "as above", ("get_target_groups", "app_name")
)

_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
ZERO_1_2 = Internal(
    _STAGE_1_2,
    "DeepSpeedZeroOptimizer",
    "access to the shards of values, moments and EMA, so that a state has DeepSpeed's own layout",
    (
        *("single_partition_of_fp32_groups", "update_lp_params", "_hp_mapping"),
        *("buffered_reduce_fallback", "average_tensor"),
    ),
)
ZERO_3 = Internal(
    "deepspeed.runtime.zero.stage3",
    "DeepSpeedZeroOptimizer_Stage3",
    "as above",
    (
        *("fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat", "grad_position", "get_param_id"),
        *("checkpoint_event_prologue", "checkpoint_event_epilogue", "_unflatten_partitioned_parameters"),
    ),
)
FRAGMENT = Internal(
    "deepspeed.utils.tensor_fragment",
    "tensor_fragment",
    "as above",
    ("lp_fragment_address", "hp_fragment_address", "param_group_index"),
)
FORWARD_STACK = Internal(
    "deepspeed.runtime.zero.parameter_offload", "FWD_MODULE_STACK", "an engine that releases its model when destroyed"
)
COMPATIBLE_OPS = Internal("deepspeed.ops", "__compatible_ops__", "a setting not to compile an operator")
SHM_COMM = Internal("deepspeed.ops.op_builder.cpu.comm", "ShareMemCommBuilder", "as above", ("deepspeed_shm_comm",))
COMPILE = Internal("deepspeed.runtime.compiler", "compile", "kernels of Muon that are compiled when they are used")
MUON = Internal("deepspeed.runtime.zero.muon.original_muon", "Muon", "as above")

INTERNALS = {name: value for name, value in globals().items() if isinstance(value, Internal)}

NO_COUNTERS = {"RAY_enable_metrics_collection": "0", "AUTOSCALER_METRIC_PORT": "-1", "DASHBOARD_METRIC_PORT": "-1"}
"""Environment of a Ray without counters. They would be served on all addresses, without a token."""
NO_WATCHER = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""Environment of a Ray with one node. Its jobs need no actor that watches for preemption notices."""
