"""What a training job left: weights, curve and files; and how far two runs are apart."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import obstore
import obstore.store
import torch
from safetensors.torch import load

from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.train.heldout import DRAWS, GROUPS, LOSSES, STEPS

Files = Mapping[str, Sequence[object]]
"""Inode, or tag in a bucket, and time of change by path."""


def weights_of(run: Run, artifact: Artifact) -> dict[str, torch.Tensor]:
    """The EMA weights that the job's manifest names."""
    info = run.require(artifact).info
    return load(run.read(artifact, f"{info['weights']}/ema.safetensors"))


def checksums_of(run: Run, artifacts: Sequence[Artifact]) -> dict[str, str]:
    """SHA-256 of the EMA weights of finished trainings, by artifact."""
    return {
        artifact: file.sha256
        for artifact in artifacts
        for name, file in run.require(artifact).files.items()
        if name.endswith("ema.safetensors")
    }


def curve_of(run: Run, artifact: Artifact) -> dict[str, torch.Tensor]:
    """Each step's loss and gradient norm."""
    return load(run.read(artifact, f"{run.require(artifact).info['weights']}/curve.safetensors"))


def until(step: int, curve: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A curve of the first steps: each one's loss and gradient norm, and what was measured by then."""
    measured = int((curve[STEPS] <= step).sum()) if STEPS in curve else 0
    most = {STEPS: measured, DRAWS: measured, LOSSES: measured * GROUPS}
    return {name: values[: most.get(name, step)] for name, values in curve.items()}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def apart(a: Run, b: Run, artifact: Artifact) -> float:
    """Largest difference of any step's loss or gradient norm, or of any EMA weight."""
    for run in (a, b):
        assert len(curve_of(run, artifact)["loss"]) == run.require(artifact).info["step"]
    return max(difference(of(a, artifact), of(b, artifact)) for of in (curve_of, weights_of))


def stored(run: Run, artifact: Artifact) -> dict[str, list[object]]:
    """All objects of an artifact, by whatever their storage tells them apart; what is replaced is another one."""
    if run.store.local:
        return {**files(run.store.local / artifact)}
    objects = obstore.list(obstore.store.from_url(f"{run.url}/{artifact}")).collect()
    return {entry["path"]: [entry["e_tag"], entry["last_modified"]] for entry in objects}


def files(folder: Path) -> dict[str, list[int]]:
    """All files below a folder that may change meanwhile; what is replaced is another file."""
    stats = {}
    for path in folder.rglob("*"):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        if path.is_file():
            stats[str(path.relative_to(folder))] = [stat.st_ino, stat.st_mtime_ns]
    return stats


def touched(before: Files, after: Files, attempts: Sequence[int]) -> list[str]:
    """Files of these attempts, which had ended, that were written since, or deleted though they aren't of a state."""
    ended = tuple(f"attempts/{number:04d}/" for number in attempts)
    rewritten = [path for path, stat in after.items() if path.startswith(ended) and before.get(path) != stat]
    return rewritten + [
        path for path in before.keys() - after.keys() if path.startswith(ended) and "/state/" not in path
    ]


def final_weights(run: Run, artifact: Artifact) -> list[str]:
    """Where weights of the last step were published, by any attempt."""
    last = f"weights/step-{run.require(artifact).info['step']:09d}/_MANIFEST.json"
    return [name for name in run.store.sizes(artifact) if name.endswith(last)]
