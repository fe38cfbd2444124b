"""Every name that Ray doesn't promise to keep and that this package uses, with the public behaviour it stands in for.

Written for Ray 2.60. Nothing is imported before it is asked for. `tests/test_ray_internals.py` names what a new Ray has
moved.
"""

import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

from ddm_ray.errors import RayError

_TRAIN = "ray.train.v2._internal"
_COORDINATOR = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"


@dataclass(frozen=True)
class Internal:
    """The object `name` of a module of Ray's; `uses` are the methods, fields, parameters or texts of it relied on."""

    module: str
    name: str
    stands_for: str
    uses: tuple[str, ...] = ()

    def get(self) -> Any:
        """The object. Raises RayError where this Ray has it no longer."""
        try:
            return attrgetter(self.name)(import_module(self.module))
        except (ImportError, AttributeError):
            version = import_module("ray").__version__
            raise RayError(
                f"Ray {version} has no {self.module}.{self.name}; install the version in constraints.txt"
            ) from None

    def lacks(self) -> list[str]:
        """Names of `uses` that the object doesn't have in this Ray. Raises RayError if it is gone itself."""
        ray_object = self.get()
        missing = [use for use in self.uses if not hasattr(ray_object, use)]
        if not missing:
            return []
        source = inspect.getsource(ray_object)
        return [use for use in missing if not re.search(rf"(?<!\w){re.escape(use)}(?!\w)", source)]


TRAINER = Internal(
    "ray.train.v2.api.data_parallel_trainer",
    "DataParallelTrainer",
    "ray.train.torch.TorchTrainer, with which whoever starts workers would load torch too, for seconds",
    ("fit", "train_run_context", "backend_config", "_create_default_callbacks"),
)
BACKEND = Internal(
    "ray.train.backend",
    "Backend",
    "ray.train.torch.TorchConfig, as above",
    ("on_start", "on_shutdown", "share_cuda_visible_devices"),
)
BACKEND_CONFIG = Internal("ray.train.backend", "BackendConfig", "as above", ("backend_cls", "train_func_context"))
BACKEND_WORKERS = Internal(
    "ray.train._internal.base_worker_group",
    "BaseWorkerGroup",
    "workers that a backend may call",
    ("execute_single", "execute_single_async", "execute_async"),
)
DATASETS_CALLBACK = Internal(
    f"{_TRAIN}.callbacks.datasets",
    "DatasetsCallback",
    "a trainer without an actor that manages no data sets, for seconds of each start",
)
CONTROLLER_CALLBACK = Internal(
    f"{_TRAIN}.execution.callback",
    "ControllerCallback",
    "a ray.train.UserCallback that hears of a resize before it happens",
    ("before_controller_execute_resize_decision", "after_controller_state_update"),
)
WORKER_GROUP_CALLBACK = Internal(
    f"{_TRAIN}.execution.callback",
    "WorkerGroupCallback",
    "a ray.train.UserCallback that is given the workers",
    ("after_worker_group_start", "before_worker_group_shutdown"),
)
WORKER_GROUP = Internal(
    f"{_TRAIN}.execution.worker_group.worker_group",
    "WorkerGroup",
    "workers that a callback may call",
    ("get_latest_poll_status", "get_workers"),
)
WORKER = Internal(
    f"{_TRAIN}.execution.worker_group.worker", "Worker", "a worker that a callback may call", ("execute_async",)
)
POLL_STATUS = Internal(
    f"{_TRAIN}.execution.worker_group.poll", "WorkerGroupPollStatus", "what workers said last", ("errors",)
)
TRAIN_CONTEXT = Internal(
    f"{_TRAIN}.execution.context",
    "get_train_context",
    "ray.train.get_preemption_info, which waits for all ranks, and a question whether the loop still runs",
)
TRAIN_CONTEXT_FIELDS = Internal(
    f"{_TRAIN}.execution.context", "TrainContext", "as above", ("preemption_context", "execution_context")
)
EXECUTION_CONTEXT = Internal(f"{_TRAIN}.execution.context", "ExecutionContext", "as above", ("training_thread_runner",))
PREEMPTION_CONTEXT = Internal(f"{_TRAIN}.execution.context", "PreemptionContext", "as above", ("preemption_info",))
THREAD_RUNNER = Internal(f"{_TRAIN}.execution.worker_group.thread_runner", "ThreadRunner", "as above", ("is_running",))
STARTUP_FAILED = Internal(
    f"{_TRAIN}.exceptions",
    "WorkerGroupStartupFailedError",
    "a placement group that is released when its workers fail to start",
)
RESCHEDULING = Internal(
    f"{_TRAIN}.execution.controller.state", "ReschedulingState", "as above", ("training_failed_error",)
)
RUN_CONTEXT = Internal(f"{_TRAIN}.execution.context", "TrainRunContext", "a name for what a run reserves", ("run_id",))
RESERVATION_NAME = Internal(
    f"{_TRAIN}.execution.scaling_policy.scaling_policy",
    "ScalingPolicy",
    "as above",
    ("train-{train_run_context.run_id}",),
)
COORDINATOR = Internal(
    _COORDINATOR,
    "_AutoscalingCoordinatorActor",
    "a reservation that ends with its owner, and nodes that are noticed at once",
    ("get_reserved_resources", "recompute", "cancel_request", "requester_id"),
)
COORDINATOR_NAME = "AutoscalingCoordinator"
COORDINATOR_ACTOR = Internal(
    _COORDINATOR,
    "get_or_create_autoscaling_coordinator",
    "as above",
    (f'name="{COORDINATOR_NAME}"', f'namespace="{COORDINATOR_NAME}"'),
)
ACTORS = Internal("ray._private.state", "actors", "ray.util.state.get_actor, which needs a dashboard")
STATE = Internal(
    "ray._private.state",
    "state",
    "a placement group that is released when the actor that made it dies",
    ("_connect_and_get_accessor",),
)
STATE_ACCESSOR = Internal("ray._raylet", "GlobalStateAccessor", "as above", ("get_placement_group_table",))
PLACEMENT_GROUP_RECORD = Internal(
    "ray.core.generated.gcs_pb2",
    "PlacementGroupTableData",
    "as above",
    ("FromString", "REMOVED"),
)
HEAD_RESOURCE = Internal(
    "ray._common.constants", "HEAD_NODE_RESOURCE_NAME", "a scheduling strategy for the head's node"
)
CONFIG = Internal("ray._raylet", "Config", "a second ray.init that heeds a changed environment", ("initialize",))
TOKEN_LOADER = Internal(
    "ray._raylet", "AuthenticationTokenLoader", "ray.init with a token", ("instance", "reset_cache")
)
SERVE_CLIENT = Internal(
    "ray.serve.context",
    "_get_global_client",
    "an API that tells where replicas listen; Serve's REST API does, which needs a dashboard",
)
SERVE_CLIENT_FIELDS = Internal("ray.serve._private.client", "ServeControllerClient", "as above", ("_controller",))
SERVE_CONTROLLER = Internal(
    "ray.serve._private.controller", "ServeController", "as above", ("get_target_groups", "app_name")
)

INTERNALS = {name: value for name, value in globals().items() if isinstance(value, Internal)}
