"""Options for devices, and the messages about them: --device for one process, --gpu for Ray's workers."""

import os
import re
from typing import Any

import click

from ddm_ray.cli.command import say, warn
from ddm_ray.errors import ConfigError


class Device(click.ParamType):
    """A device by its name. This machine needn't have it."""

    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
            raise ConfigError(f"--device {value!r:.60}: write auto, cpu, cuda or cuda:N")
        return value


DEVICE = click.option(
    "--device",
    type=Device(),
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda|cuda:N",
    help="Compute on the CPU or a GPU. auto: the first GPU, if there is one.",
)
GPU = click.option(
    "--gpu/--cpu",
    default=None,
    help="One GPU per worker, or none. Default: use_gpu of the island's file, else none.",
)


def device_of(asked: str) -> str:
    """Torch's name of the device for --device. Prints which device it is. Raises SamplingError."""
    from ddm_ray.sampling.devices import choose_device, describe_device, idle_gpus

    device = choose_device(asked)
    say(f"device: {describe_device(device)}", err=True)
    if idle := idle_gpus(device):
        warn(f"{idle}; --device cuda computes there" if asked == "cpu" else idle)
    return device


def served_device(asked: str, address: str | None) -> str:
    """The device of a server's processes. Ray assigns their GPUs.

    With `cuda:N` a private Ray sees only that GPU. If a Ray is joined (at `address`, or $RAY_ADDRESS), it chooses the
    GPU, and `cuda:N` raises ConfigError. Raises SamplingError for a missing device.
    """
    if address or os.environ.get("RAY_ADDRESS"):
        if ":" in asked:
            raise ConfigError(f"--device {asked}: the Ray that is joined chooses the GPU; write cuda")
        return asked
    device = device_of(asked)
    if ":" in device:
        number = int(device.partition(":")[2])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number] if visible[0] else str(number)
    return device.partition(":")[0]


def placed(placement: Any, gpu: bool | None) -> Any:
    """A placement for training or preparation, changed by --gpu or --cpu if either is given."""
    if gpu is None or gpu == placement.use_gpu:
        return placement
    changes: dict[str, Any] = {"use_gpu": gpu}
    if "GPU" in (resources := getattr(placement, "resources_per_worker", {})):
        changes["resources_per_worker"] = {name: amount for name, amount in resources.items() if name != "GPU"}
    return placement.model_copy(update=changes)


def require_gpu(address: str | None) -> None:
    """Raise ConfigError if workers need GPUs on a private Ray and torch sees none on this machine."""
    if not (address or os.environ.get("RAY_ADDRESS")):
        from ddm_ray.sampling.devices import AUTO, choose_device

        if choose_device(AUTO) == "cpu":  # Ray also counts GPUs that torch can't use
            raise ConfigError("--gpu: PyTorch sees no GPU on this machine; leave it out")


def tell_of_workers(work: str, use_gpu: bool, gpus: float) -> None:
    """Say whether Ray's workers `work` on GPUs, and warn of idle ones. `gpus`: number of GPUs of the Ray."""
    say(f"device: workers {work} on {'GPUs' if use_gpu else 'the CPU'}", err=True)
    if gpus and not use_gpu:
        warn(f"{gpus:g} GPUs of this Ray stand idle; --gpu has workers {work} there")
