"""Checks of a machine that is to train a run, as one list. Each check returns "" or a line with the remedy."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddm_ray.data.loading.cache import cache_root
from ddm_ray.errors import StorageError
from ddm_ray.islands.needs import ModelNeeds
from ddm_ray.jobs.examination import broken_word
from ddm_ray.jobs.versions import installed_versions
from ddm_ray.memory import total_bytes
from ddm_ray.models.hub import out_of_reach
from ddm_ray.placement import TrainPlacement
from ddm_ray.spelling import amount
from ddm_ray.store.refusals import refusal
from ddm_ray.store.store import Store


@dataclass(frozen=True)
class Machine:
    """A machine, and the training jobs in which it is to take part.

    `needs`: those of the unfinished models. `encoders`: names of their text encoders. `workers`: number of workers of
    one job, `here` of them on this machine. `in_ray`: this process has joined the Ray cluster that is to train.
    `expected`: versions of libraries that all machines should have. `note`: key of an object on the run's storage,
    which shows that all machines see the same storage.
    """

    run_url: str
    placement: TrainPlacement
    needs: Sequence[ModelNeeds] = ()
    encoders: Sequence[str] = ()
    workers: int = 1
    here: int = 1
    in_ray: bool = False
    expected: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def storage(machine: Machine) -> str:
    """Check that the run's storage can be reached and is reliable."""
    store = Store(machine.run_url)
    try:
        if machine.note and not store.exists(machine.note):
            return (
                f"{store.url} is another storage here than where this was asked; put the run where each island sees it:"
                " in a bucket, or in a folder that all machines share"
            )
    except StorageError as error:
        return error.text()
    word = broken_word(store)
    return word and f"{store.url}: {word}"


def versions(machine: Machine) -> str:
    """Check that libraries have the expected versions."""
    here = installed_versions()
    # Builds of one version, such as 2.12.0+cpu, and patch versions of Python compute the same.
    others = [
        f"{library.replace('_', '-')} is {here.get(library, 'missing')}, where this was asked {version}"
        for library, version in machine.expected.items()
        if _comparable(library, here.get(library, "")) != _comparable(library, version)
    ]
    return f"{'; '.join(others)}; install the same there and here, as the constraints file has them" if others else ""


def token(machine: Machine) -> str:
    """Check that the Ray cluster requires a token."""
    if not machine.in_ray or os.environ.get("RAY_AUTH_MODE") == "token":
        return ""
    return "this Ray asks for none, so anyone who reaches it can run code there; start it with RAY_AUTH_MODE=token"


def workers(machine: Machine) -> str:
    """Check that the Ray cluster has room for the workers."""
    if not machine.in_ray:
        return ""
    from ddm_ray.train.ray.room import shortage

    return shortage(machine.placement)


def gpus(machine: Machine) -> str:
    """Check that PyTorch sees a GPU for each worker."""
    if not machine.placement.use_gpu or machine.here <= (seen := len(_gpus())):
        return ""
    return f"{machine.here} are to train here, PyTorch sees {seen}; install a driver and a PyTorch that know each other"


def memory(machine: Machine) -> str:
    """Check that memory holds the state of each model. Activations and libraries need more on top."""
    placement = machine.placement
    for need in machine.needs if machine.here else ():
        each = need.memory(machine.workers, placement.use_gpu, placement.teachers)[placement.zero_stage]
        if each is None:
            continue
        fewer = ", fewer teachers" if need.teachers_bytes(placement.use_gpu, placement.teachers) else ""
        remedy = f"choose more workers, a higher zero_stage{fewer}, or machines with more"
        for name, size in _gpus() if placement.use_gpu else ():
            if each > size:
                return f"a {name} has {amount(size)}, its part of {_one(need)} takes {amount(each)}; {remedy}"
        # A state on a GPU is copied to the machine's memory when it is saved.
        taken = machine.here * (need.state_bytes / machine.workers if placement.use_gpu else each)
        if taken > total_bytes():
            has = f"there are {amount(total_bytes())}"
            return f"{has}, the state of {_one(need)} takes {amount(taken)} here; {remedy}"
    return ""


def cache(machine: Machine) -> str:
    """Check that the cache has room for the rows of a model, which are copied from a bucket."""
    if Store(machine.run_url).local is not None or not machine.here:
        return ""
    root = cache_root(machine.placement.cache)
    remedy = "or name another folder as cache in the islands' file"
    try:
        folder = next(each for each in (root, *root.absolute().parents) if each.exists())
        copies = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
        room = shutil.disk_usage(folder).free + copies
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK) or not folder.is_dir():
            return f"{root}: {folder} is no folder that this user may write to; let it, {remedy}"
    except OSError as error:
        return f"{root}: {refusal(error, root)}; mend that, {remedy}"
    for need in machine.needs:
        if (rows := max((need.rows or {}).values(), default=0)) > room:
            has = f"{root} has room for {amount(room)}"
            return f"{has}, the rows of {_one(need)} are {amount(rows)}; make room, {remedy}"
    return ""


def encoders(machine: Machine) -> str:
    """Check that the text encoders can be loaded here."""
    away = next(filter(None, map(out_of_reach, machine.encoders)), "")
    return away and f"{away}; let this machine reach the hub, or copy the network into its cache (HF_HOME)"


CHECKS: Sequence[Callable[[Machine], str]] = (storage, versions, token, workers, gpus, memory, cache, encoders)


def check(machine: Machine) -> dict[str, str]:
    """The answer of each check by its name; empty if all is well."""
    return {each.__name__: each(machine) for each in CHECKS}


def _one(need: ModelNeeds) -> str:
    """Words for one of the models: the first, where experts differ."""
    return f"one {need.kind}" if need.name == need.kind else str(next(iter(need.left)))


def _comparable(library: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if library == "python" else version.partition("+")[0]


def _gpus() -> list[tuple[str, float]]:
    """Name and bytes of memory of each GPU that PyTorch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [(device.name, float(device.total_memory)) for device in devices]
