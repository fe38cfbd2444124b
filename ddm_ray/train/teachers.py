"""Teachers of a student: predictions of the run's experts, alone or mixed, for the rows that the student learns.

Shapes: B rows, R rows of one call, CHW image, K experts.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.flow import Flow, interpolate
from ddm_ray.core.mixture import group_rows, mix, posterior
from ddm_ray.core.routing import Strategy, parse_strategy
from ddm_ray.core.snr import as_prediction
from ddm_ray.core.transfer import frozen_dtype
from ddm_ray.data.loading.cache import local_files
from ddm_ray.data.loading.verified import VerifiedFile
from ddm_ray.jobs.published import Weights
from ddm_ray.models.network import Network
from ddm_ray.models.spec import spec_of
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import PARTITION, ROUTER, Artifact
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.inputs import beginning_of
from ddm_ray.run.manifest import verify
from ddm_ray.run.run import Run
from ddm_ray.sampling.driver import Experts, answers
from ddm_ray.sampling.initial_weights import load_initial_weights
from ddm_ray.sampling.offload import Offloaded, OffloadedToDisk
from ddm_ray.sampling.request import ExpertCall
from ddm_ray.sampling.run_models import NETWORK, load_base, load_network, network_bytes, parse_network
from ddm_ray.store.refusals import as_storage_error
from ddm_ray.train.job import TrainJob
from ddm_ray.train.objectives import Batch


@dataclass(frozen=True)
class Teachers:
    """Predictions of frozen experts, of the kind that the student learns (velocity, noise, ...), on its path.

    Mixing predictions is the same as mixing velocities: each is affine in the other at any (x, t), and weights sum to
    1. `strategy` chooses experts by the `router`'s posterior; None: the expert of a row's own cluster. Guidance is as
    in sampling: `full` mixes each branch by its own posterior, other strategies use the same weights for both. `null`
    gives the null condition of so many rows.
    """

    experts: Experts
    path: str
    null: Callable[[int], Condition]
    strategy: Strategy | None = None
    router: nn.Module | None = None
    guidance_scale: float = 1.0

    @property
    def by_cluster(self) -> bool:
        """True if rows should come cluster by cluster: only some experts are in memory, each for its own cluster."""
        return isinstance(self.experts, Offloaded) and self.strategy is None

    def taught(self, batch: Batch, cluster_B: Tensor | None = None) -> Batch:
        """The batch with its teacher's predictions. `cluster_B`: its clusters on the host, which saves a wait."""
        x_BCHW = interpolate(batch.data_BCHW, batch.noise_BCHW, batch.t_B, self.path)
        t_B, condition = batch.t_B, batch.encoded
        with torch.no_grad():
            weights_BK = self._weights(x_BCHW, t_B, condition, batch.cluster_B)
            used_BK: np.ndarray | None = None
            if self.strategy is None and cluster_B is not None:
                used_BK = one_hot(cluster_B, len(self.experts)).numpy() > 0
            predicted = self._predicted(x_BCHW, t_B, condition, weights_BK, used_BK)
            if self.guidance_scale != 1:
                null = self.null(len(x_BCHW)).to(x_BCHW.device)
                if self.strategy is not None and self.strategy.when == "velocity":
                    weights_BK = self._weights(x_BCHW, t_B, null, batch.cluster_B)
                without = self._predicted(x_BCHW, t_B, null, weights_BK, used_BK)
                predicted = torch.lerp(without, predicted, self.guidance_scale)
        return replace(batch, teacher_BCHW=predicted)

    def _predicted(
        self, x_BCHW: Tensor, t_B: Tensor, condition: Condition, weights_BK: Tensor, used_BK: np.ndarray | None
    ) -> Tensor:
        used_BK = (weights_BK > 0).cpu().numpy() if used_BK is None else used_BK
        groups = group_rows(used_BK, x_BCHW.device)
        calls = []
        for group in groups:
            rows = slice(None) if group.rows_R is None else group.rows_R
            calls.append(ExpertCall(group.expert, x_BCHW[rows], t_B[rows], condition[rows]))
        predicted = [answer.to(x_BCHW.dtype) for answer in answers(calls, self.experts, None)]
        return mix(groups, predicted, weights_BK)

    def _weights(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition, cluster_B: Tensor) -> Tensor:
        if self.strategy is None:
            return one_hot(cluster_B, len(self.experts)).to(x_BCHW.dtype)
        assert self.router is not None
        probs_BK = posterior(self.router(x_BCHW, t_B, condition).to(x_BCHW.dtype))
        return self.strategy.route(probs_BK, torch.zeros_like(probs_BK), None)


@contextmanager
def teachers_of(
    run: Run, job: TrainJob, null_text: Text | None, device: torch.device, placement: TrainPlacement
) -> Iterator[Teachers | None]:
    """The teachers of a student's job; None for other jobs. Raises as `load_teachers`."""
    if job.artifact.kind != "student":
        yield None
    elif placement.teachers is None:
        yield load_teachers(run, null_text, device)
    else:
        with offloaded_teachers(run, null_text, device, placement.teachers, placement.cache) as offloaded:
            yield offloaded


def load_teachers(run: Run, null_text: Text | None, device: torch.device) -> Teachers:
    """The teachers of a run's student, frozen, by their published weights; in bf16 on a GPU.

    Raises MissingArtifact for one that isn't finished, CorruptArtifact if a byte was altered.
    """
    base = load_base(run, run.experts[0], device, frozen_dtype(device))
    experts = [_teacher(run, artifact, _load(run, artifact, device, base)) for artifact in run.experts]
    return _teachers(run, null_text, device, experts)


@contextmanager
def offloaded_teachers(
    run: Run, null_text: Text | None, device: torch.device, resident: int, cache: str | None = None
) -> Iterator[Teachers]:
    """The teachers with `resident` experts, 2 or more, in memory at a time; the others are in their files.

    Files of a run in an object store are copied once, when the expert is first used; `cache`: see `local_files`. They
    are verified each time that they are read. Raises as `load_teachers`, also when an expert is used.
    """
    copies: dict[int, list[VerifiedFile]] = {}
    base = load_base(run, run.experts[0], device, frozen_dtype(device))
    with ExitStack() as stack:  # copies on the disk go last, after the thread that makes them has ended

        def fetch(expert: int) -> nn.Module:
            artifact = run.experts[expert]
            spec = spec_of(run.config, artifact.kind, artifact.cluster)
            if expert not in copies:
                manifest, published = run.require(artifact), Weights.finished(run, artifact)
                names = [f"{published.prefix}/{name}" for name in NETWORK]
                files = dict(zip(NETWORK, map(manifest.files.get, names), strict=True))
                published.require_small(run, files, network_bytes(spec))
                copies[expert] = stack.enter_context(local_files(run, manifest, names, cache))
            described, tensors = map(_read, copies[expert])
            network, _ = parse_network(described, tensors, f"{run.url}/{artifact}", spec, base)
            return _teacher(run, artifact, network.to(device, frozen_dtype(device)).requires_grad_(False))

        for artifact in run.experts:
            run.require(artifact)
        with closing(OffloadedToDisk(fetch, [True] * len(run.experts), resident)) as experts:
            yield _teachers(run, null_text, device, experts)


def _read(file: VerifiedFile) -> bytes:
    with as_storage_error(file.path), file.open() as opened:
        return verify(opened.read(), file.record, str(file.path))


def _load(run: Run, artifact: Artifact, device: torch.device, base: Network | None = None) -> nn.Module:
    network = load_network(run, Weights.finished(run, artifact), str(device), frozen_dtype(device), base)
    return network.requires_grad_(False)


def _teacher(run: Run, artifact: Artifact, network: nn.Module) -> nn.Module:
    """An expert as the student learns from it: as a network of the flow that is the student's."""
    own, students = (
        Flow(each.path, each.prediction) for each in (run.config.flow_of(artifact.cluster), run.config.flow)
    )
    return as_prediction(network, own, students)


def _teachers(run: Run, null_text: Text | None, device: torch.device, experts: Experts) -> Teachers:
    config, job = run.config, run.config.student

    def null(count: int) -> Condition:
        if null_text is not None:
            return null_text[torch.zeros(count, dtype=torch.long)]
        assert config.data.num_classes is not None
        return torch.full((count,), config.data.num_classes)

    strategy = None if job.teacher == "label" else parse_strategy(job.teacher, len(run.experts))
    router = None if strategy is None else _load(run, ROUTER, device)
    return Teachers(experts, config.flow.path, null, strategy, router, job.guidance_scale)


def model_for_state(run: Run, job: TrainJob) -> nn.Module:
    """The model of a job that a state is read into, with whatever memory holds. Raises as `load_base`."""
    return job.build(filled=False, base=load_base(run, job.artifact))


def first_model(run: Run, job: TrainJob) -> nn.Module:
    """The model that a job begins with: random weights, those of `init_from`, or those of `student.start`.

    Raises as `load_teachers`.
    """
    base, start = load_base(run, job.artifact), run.config.student.start
    model = job.build(base=base)
    if base is not None:
        return model
    for beginning in beginning_of(run.config, job.artifact):
        model.load_state_dict(load_initial_weights(run, beginning, job.spec).state_dict())
        return model
    if job.artifact.kind != "student" or start == "random":
        return model
    chosen = list(run.experts)
    if start == "largest":
        rows_K = PartitionInfo.of(run.require(PARTITION)).rows_K
        chosen = [chosen[max(range(len(chosen)), key=rows_K.__getitem__)]]
    state = model.state_dict()
    for number, artifact in enumerate(chosen, start=1):  # one at a time in memory: they may be large
        weights = load_network(run, Weights.finished(run, artifact)).state_dict()
        for name, tensor in state.items():
            tensor.lerp_(weights[name], 1 / number)
    return model
