"""The device that this process computes on: the best there is, or the one that was asked for; and GPUs left idle."""

from pathlib import Path
from typing import Any

import torch

from ddm_ray.errors import SamplingError
from ddm_ray.remedies import Give

AUTO = "auto"
"""Name of the device that is a GPU where torch sees one, else the CPU."""
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def choose_device(asked: Any) -> str:
    """Torch's name of a device by a name, the number of a GPU or a torch.device: of "auto" a GPU or the CPU.

    Raises SamplingError for one that isn't there.
    """
    if asked == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        name = str(torch.device(asked))
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, TypeError) as error:  # what torch raises depends on how it was built
        reason = str(error).splitlines()[0].partition(". ")[0]
        others = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        fix = Give("device", f"choose {' or '.join(others)}")
        raise SamplingError(f"device {str(asked)[:60]!r} isn't there: {reason}", fix) from None
    return name


def describe_device(device: str) -> str:
    """A name for people, as `cuda:0 (NVIDIA H100), one of 4 GPUs` or `cpu (8 threads)`."""
    if not device.startswith("cuda"):
        return f"{device} ({torch.get_num_threads()} threads)" if device == "cpu" else device
    number = torch.device(device).index or 0
    count = torch.cuda.device_count()
    return f"cuda:{number} ({torch.cuda.get_device_name(number)})" + (f", one of {count} GPUs" if count > 1 else "")


def idle_gpus(device: str) -> str | None:
    """Words on GPUs of this machine that stand idle while all is computed on this device, and why; None: none does."""
    if device != "cpu":
        return None
    if torch.cuda.is_available():
        return f"a GPU stands idle ({torch.cuda.get_device_name(0)})"
    if DRIVER_GPUS.is_dir() and any(DRIVER_GPUS.iterdir()):
        return f"a GPU stands idle, since this PyTorch ({torch.__version__}) can't use it: install one for CUDA"
    return None
