"""Sizes of what a training job writes, known before it is run: a state and published weights, file by file."""

import json
from array import array
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import ceil

from torch import nn

from ddm_ray.config import RunConfig
from ddm_ray.storage import graph
from ddm_ray.storage.identity import fields_of
from ddm_ray.storage.info import Info, StateInfo, WeightsInfo
from ddm_ray.storage.manifest import NAME, FileRecord, Identity, Manifest
from ddm_ray.train import state
from ddm_ray.train.fragments import EMA, RECORDS, Fragment
from ddm_ray.train.heldout import DRAWS, GROUPS, LOSSES, STEPS, Schedule
from ddm_ray.train.job import TrainJob
from ddm_ray.train.publish import WEIGHTS

# Of no file: sizes don't depend on what checksums say.
_SHA256, _DIGEST, _PRINT = "0" * 64, "0" * 16, 2**63


class FileSizes:
    """Bytes of a job's files by name, as `world` ranks with this ZeRO stage write them, their manifest among them."""

    def __init__(
        self,
        config: RunConfig,
        job: TrainJob,
        model: nn.Module,
        world: int = 1,
        zero_stage: int = 1,
        heldout: Schedule | None = None,
    ):
        """`model` is the job's, on any device; `heldout`: when its held-out loss is measured, None: never."""
        self._job, self._heldout = job, heldout
        inputs = {str(name): _DIGEST for name in graph.inputs(config, job.artifact)}
        self._identity = Identity(fields_of(config, job.artifact), inputs)
        self._attempt = f"{job.artifact}/attempts/0001"
        self._weights = _safetensors_bytes(model)
        self._shards: dict[str, FileRecord] = {}
        self._world = world
        self._manifests: dict[str, int] = {}  # which take time to make
        for rank, fragments in enumerate(_shares(model, world, zero_stage)):
            files = _rank_files(fragments)
            self._shards |= {f"{state.RANK.format(rank)}/{name}": record for name, record in files.items()}

    def state(self, step: int) -> dict[str, int]:
        """The files of the state after `step` steps."""
        info = StateInfo(step=step, seconds=1.2345678901234567 * step, world_size=self._world)
        prefix = f"{self._attempt}/state/step-{step:09d}"
        return self._with_manifest(prefix, self._shards | {state.CURVE: self._curve(step)}, info)

    def published(self, step: int) -> dict[str, int]:
        """The files of the weights after `step` steps, but for their picture."""
        spec = json.dumps(self._job.spec, indent=2, sort_keys=True).encode()
        files = {WEIGHTS: _record(self._weights), "model.json": FileRecord.of(spec), state.CURVE: self._curve(step)}
        return self._with_manifest(f"{self._attempt}/weights/step-{step:09d}", files, WeightsInfo(step=step))

    def read_to_publish(self, step: int) -> int:
        """Bytes of a state that are read to publish its weights."""
        files = self.state(step)
        kept = {
            name for name in files if f"/{EMA}-" in name or name in (state.CURVE, NAME) or name.endswith(state.INDEX)
        }
        return sum(files[name] for name in kept)

    def _curve(self, step: int) -> FileRecord:
        return _curve(step, 0 if self._heldout is None else self._heldout.measured(step))

    def _with_manifest(self, prefix: str, files: Mapping[str, FileRecord], info: Info) -> dict[str, int]:
        if prefix not in self._manifests:
            manifest = Manifest(prefix, self._identity, dict(files), info.as_json())
            self._manifests[prefix] = len(manifest.to_json())
        return {name: record.bytes for name, record in files.items()} | {NAME: self._manifests[prefix]}


def _record(size: int) -> FileRecord:
    return FileRecord(size, _SHA256)


@lru_cache(maxsize=16)
def _curve(step: int, measured: int) -> FileRecord:
    values = array("d", bytes(8 * step))
    curve = {"loss": values, "grad_norm": values}
    if measured:
        curve |= {name: array("d", bytes(8 * measured)) for name in (STEPS, DRAWS)}
        curve |= {LOSSES: array("d", bytes(8 * GROUPS * measured))}
    return _record(len(state.curve_bytes(curve)))


def _safetensors_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters, and of the buffers that go with them, in one file."""
    persistent = model.state_dict().keys()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in persistent}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return len(state.safetensors_header(shapes)) + 4 * sum(tensors[name].numel() for name in shapes)


def _shares(model: nn.Module, world: int, zero_stage: int) -> Iterator[list[Fragment]]:
    """Each rank's fragments, but for the few elements that fill up partitions."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    flat = ceil(sum(sizes.values()) / world)
    for rank in range(world):
        fragments, at = [], 0
        for name, numel in sizes.items():
            # Stages 1 and 2 cut all parameters end to end, the others each one.
            share = flat if zero_stage in (1, 2) else ceil(numel / world)
            first = rank * share - (at if zero_stage in (1, 2) else 0)
            fragments.append(Fragment(name, 0, numel, {}).part(first, first + share))
            at += numel
        yield [fragment for fragment in fragments if fragment.numel]


def _rank_files(fragments: list[Fragment]) -> dict[str, FileRecord]:
    """A rank's parts and index, by name."""
    files, entries = {}, {}
    groups = [[state.Piece(one.name, one.start, one.numel) for one in group] for group in state.cut(fragments)]
    for record in RECORDS:
        for number, pieces in enumerate(groups):
            name = state.PART.format(record, number)
            size = len(state.part_header(pieces)) + 4 * sum(piece.numel for piece in pieces)
            files[name] = _record(size)
            entries[name] = state.index_entry(files[name], record, pieces)
    index = state.index_bytes(entries, dict.fromkeys(RECORDS, _PRINT))
    return files | {state.INDEX: FileRecord.of(index)}
