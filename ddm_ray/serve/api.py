"""The ingress as a deployment: an application over the experts of this process, or over those of other deployments."""

from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from ddm_ray.sampling.run_models import load_model, mixture_info, sampling_settings
from ddm_ray.serve.deployments import local_engine
from ddm_ray.serve.engine import BatchEngine
from ddm_ray.serve.generation import expert_name
from ddm_ray.serve.guard import Guard, Limits, read_tokens
from ddm_ray.serve.http import http_app
from ddm_ray.serve.meters import Meters
from ddm_ray.serve.remote import RemoteEngine, Replicas, answer_from
from ddm_ray.serve.segments import LocalEngine, SegmentSampler
from ddm_ray.storage.graph import ROUTER
from ddm_ray.storage.run import Run


@serve.ingress()
class API:
    """Answers requests for images, by experts of its own or by those of other deployments."""

    def __init__(
        self,
        run_url: str,
        device: str,
        max_rows: int,
        token_file: str | None,
        limits: Limits,
        experts: Sequence[DeploymentHandle[Any]] = (),
    ):
        """Load all experts of a run, or take deployments of them by cluster; see `ServeArgs` for the others.

        Raises RunError, MissingArtifact, CorruptArtifact, DriftError, ConfigError.
        """
        self._tokens, self._limits = read_tokens(token_file), limits
        self._run, self._device, self._max_rows, self._experts = Run.open(run_url), device, max_rows, experts
        self._replicas = Replicas(serve.get_replica_context().app_name)
        info = mixture_info(self._run)
        if experts:
            router = load_model(self._run, ROUTER)
            self._remote = [RemoteEngine(handle, k, info, self._replicas) for k, handle in enumerate(experts)]
            self._engine = BatchEngine(answer_from(self._remote, router))
            self._engine.start()
            runners: list[Any] = list(self._remote)
        else:
            self._engine = local_engine(self._run, list(range(info.num_experts)), device, max_rows)
            runners = [LocalEngine(self._engine)] * info.num_experts
        self._meters = Meters({"api": self._engine})
        self._sampler = SegmentSampler(info, runners, LocalEngine(self._engine), self._count)

    def __serve_build_asgi_app__(self) -> Guard:
        """Build the application that Serve hands requests to."""
        http = http_app(self._sampler, self._run.config, sampling_settings(self._run), self._meters, self._lacking)
        routes = {str(getattr(route, "path", "")) for route in http.routes}

        def count(path: str, status: int) -> None:
            self._meters.answers.labels(path if path in routes else "other", str(status)).inc()

        return Guard(http, self._tokens, self._limits, on_answer=count)

    def check_health(self) -> None:
        """Raise ServeError if the engine has stopped: Serve puts another replica in this one's place."""
        self._engine.require_running()

    def _count(self, expert: int, velocities: int, switched: int) -> None:
        self._meters.segment("mixed" if expert < 0 else expert_name(expert), velocities, switched)

    async def _lacking(self) -> list[str]:
        names = [expert_name(expert) for expert in range(len(self._experts))]
        return [name for name in names if await self._replicas.lacking(name)]

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()
