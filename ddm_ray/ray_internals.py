"""Every name that Ray and DeepSpeed don't promise to keep and that this package uses, with what it stands in for.

Written for Ray 2.60 and DeepSpeed 0.19. Nothing is imported before it is asked for. `tests/test_ray_internals.py` names
what a new version has moved: objects (INTERNALS), and the variables and options that would be ignored without a word
(SETTINGS).
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
    """The object `name` of a module of theirs; `uses` are the methods, fields, parameters or texts of it relied on."""

    module: str
    name: str
    stands_for: str
    uses: tuple[str, ...] = ()

    def get(self) -> Any:
        """The object. Raises RayError where the library that is installed has it no longer."""
        try:
            return attrgetter(self.name)(import_module(self.module))
        except (ImportError, AttributeError):
            library = self.module.partition(".")[0]
            name = f"{library} {import_module(library).__version__}"
            raise RayError(f"{name} has no {self.module}.{self.name}; install the version in constraints.txt") from None

    def lacks(self) -> list[str]:
        """Names of `uses` that the object doesn't have any more. Raises RayError if it is gone itself."""
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
CLEANER_CALLBACK = Internal(
    f"{_TRAIN}.callbacks.placement_group_callback",
    "PlacementGroupCleanerCallback",
    "a cleaner that doesn't end a living controller's workers where the state API, on a busy machine, doesn't answer",
)
UNANSWERED = Internal(
    f"{_TRAIN}.exceptions", "WorkerHealthCheckTimeoutError", "a reason in a line for a worker that doesn't answer"
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
ERRORS_PRINTED = Internal(
    "ray._private.worker",
    "_worker_logs_enabled",
    "an option of ray.init by which its errors aren't printed: of each lost worker a paragraph of guesses, and of a"
    " supervisor that has done its work the words `infinite retries`",
)
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
    ("FromString", "REMOVED", "CREATED"),
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

_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
ZERO_1_2 = Internal(
    _STAGE_1_2,
    "DeepSpeedZeroOptimizer",
    "shards of values, moments and EMA as DeepSpeed holds them, with which a state has no other layout",
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
    "deepspeed.runtime.zero.parameter_offload", "FWD_MODULE_STACK", "an engine that lets go of its model when destroyed"
)
COMPATIBLE_OPS = Internal("deepspeed.ops", "__compatible_ops__", "a setting not to compile an operator")
SHM_COMM = Internal("deepspeed.ops.op_builder.cpu.comm", "ShareMemCommBuilder", "as above", ("deepspeed_shm_comm",))
COMPILE = Internal("deepspeed.runtime.compiler", "compile", "kernels of Muon that are compiled when they are used")
MUON = Internal("deepspeed.runtime.zero.muon.original_muon", "Muon", "as above")

INTERNALS = {name: value for name, value in globals().items() if isinstance(value, Internal)}


CORE = "core"
"""In place of a module: Ray's programs that aren't Python."""


@dataclass(frozen=True)
class Setting:
    """A variable of the environment, or an option, that `module` reads; `without` it, were it renamed: what happens."""

    name: str
    module: str
    without: str


_TRAIN_CONSTANTS, _SERVE_CONSTANTS = f"{_TRAIN}.constants", "ray.serve._private.constants"
_SLOW = "losses are noticed later"
_SLOW_SERVE = "requests cost more"
SETTINGS = (
    Setting("RAY_gcs_server_port_wait_time_s", "ray._private.node", "a private Ray doesn't start on a busy machine"),
    Setting("worker_register_timeout_seconds", CORE, "workers that start on a busy machine are ended"),
    Setting("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _TRAIN_CONSTANTS, _SLOW),
    Setting("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", _TRAIN_CONSTANTS, _SLOW),
    Setting("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", _TRAIN_CONSTANTS, _SLOW),
    Setting("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", _TRAIN_CONSTANTS, "a preemption is heard of later"),
    Setting("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", _TRAIN_CONSTANTS, "a private Ray's jobs start seconds later"),
    Setting("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "ray._private.accelerators.accelerator", "drivers see no GPU"),
    Setting("RAY_JOB_CONFIG_JSON_ENV_VAR", "ray._private.runtime_env.constants", "a relative RUN is accepted in a job"),
    Setting("RAY_JOB_STOP_WAIT_TIME_S", "ray.dashboard.modules.job.job_supervisor", "a stopped job saves no state"),
    Setting("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "ray._private.ray_constants", "a stopped node saves no state"),
    Setting("RAY_IGNORE_UNHANDLED_ERRORS", "ray._private.worker", "a job's error is printed as a traceback, too"),
    Setting("RAY_USAGE_STATS_ENABLED", "ray._common.usage.usage_constants", "usage is reported"),
    Setting("RAY_NAMESPACE", "ray._private.ray_constants", "an island's jobs have the namespace of its shell"),
    Setting("RAY_API_SERVER_ADDRESS", "ray._private.ray_constants", "an island's jobs go where its shell's go"),
    Setting("RAY_ADDRESS", "ray._private.ray_constants", "a command starts a private Ray"),
    Setting("RAY_HEAD_IP", "ray.autoscaler._private.util", "a cluster of Ray's launcher doesn't start"),
    Setting("RAY_USE_TLS", CORE, "links between replicas are without TLS"),
    Setting("RAY_AUTH_MODE", CORE, "a Ray answers whoever reaches it"),
    Setting("RAY_AUTH_TOKEN", CORE, "a Ray doesn't start"),
    Setting("RAY_AUTH_TOKEN_PATH", CORE, "a Ray doesn't start"),
    Setting("RAY_enable_metrics_collection", CORE, "counters are told without a token"),
    Setting("DASHBOARD_METRIC_PORT", "ray.dashboard.consts", "counters are told without a token"),
    Setting("AUTOSCALER_METRIC_PORT", "ray.autoscaler._private.constants", "counters are told without a token"),
    Setting("RAY_health_check_period_ms", CORE, _SLOW),
    Setting("RAY_health_check_failure_threshold", CORE, _SLOW),
    Setting("RAY_health_check_timeout_ms", CORE, _SLOW),
    Setting("RAY_worker_niceness", CORE, "replicas give way to all else on the machine"),
    Setting("worker_maximum_startup_concurrency", CORE, "many small jobs start one after another, with warnings"),
    Setting("_system_config", "ray._private.worker", "a private Ray doesn't start"),
    Setting("_temp_dir", "ray._private.worker", "a private Ray's files are everybody's"),
    Setting("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", _SERVE_CONSTANTS, _SLOW_SERVE),
    Setting("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", _SERVE_CONSTANTS, _SLOW_SERVE),
    Setting("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", _SERVE_CONSTANTS, "a dead proxy is missed later"),
    Setting("RAY_SERVE_ENABLE_DIRECT_INGRESS", _SERVE_CONSTANTS, _SLOW_SERVE),
    Setting("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", _SERVE_CONSTANTS, "a replica that leaves stays for 30 s"),
    Setting("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", _SERVE_CONSTANTS, "requests meet another server's replicas"),
    Setting("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", _SERVE_CONSTANTS, "requests meet another server's replicas"),
    Setting("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", _SERVE_CONSTANTS, "half-sent requests are waited for"),
)

NO_COUNTERS = {"RAY_enable_metrics_collection": "0", "AUTOSCALER_METRIC_PORT": "-1", "DASHBOARD_METRIC_PORT": "-1"}
"""Environment of a Ray that tells no counters: on all addresses it would tell them to whoever asks, with no token."""
