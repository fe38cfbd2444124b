"""To import a module changes nothing of its process: no variable, no signal handler, nothing of torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layers import ROOT, modules

pytestmark = pytest.mark.contract

PREPARES = {
    "train.ray.preloaded": "loaded by the server that drivers are forked from alone, which heeds no SIGTERM",
}
"""Modules that are imported for what they change, and why."""

LIBRARIES = (
    "threadpoolctl",
    "tensorboardX",
    "torch._inductor.utils",
    "diffusers.models.modeling_utils",
    "ray.data",
    "ray.serve",
    "ray.train.torch",
    "deepspeed",
)
"""Libraries that may change what they like; they are imported before the modules."""

SCRIPT = """
import importlib, json, os, signal, sys, warnings
libraries, modules = json.loads(sys.argv[1])
for name in libraries:
    importlib.import_module(name)
import torch

def state():
    handlers = {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()}
    torch_state = {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": str(torch.get_default_dtype()), "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(), "seed": torch.initial_seed(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
    }
    pillow = [str(each) for each in warnings.filters if "PIL" in str(each)]
    return {"variables": dict(os.environ), "handlers": handlers, "torch": torch_state, "pillow": pillow}

before, changed = state(), {}
for name in modules:
    importlib.import_module(name)
    after = state()
    if after != before:
        changed[name] = {
            kind: sorted(str(item) for item in after[kind].items() ^ before[kind].items())
            if isinstance(after[kind], dict) else after[kind]
            for kind in after if after[kind] != before[kind]
        }
        before = after
print(json.dumps(changed))
"""


def changes(
    names: list[str], folder: str = str(ROOT), libraries: tuple[str, ...] = LIBRARIES
) -> dict[str, dict[str, list[str]]]:
    """What each of these modules changes in a fresh process that imports them one after the other."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([libraries, names])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_no_module_changes_its_process() -> None:
    names = [f"ddm_ray.{name}".removesuffix(".__init__") for name in modules() if name not in PREPARES]
    assert len(names) > 250
    assert changes(names) == {}


def test_a_change_would_be_found(tmp_path: Path) -> None:
    lines = {
        "variables": 'import os; os.environ.setdefault("A_VARIABLE_OF_A_TEST", "1")',
        "handlers": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "torch": "import torch; torch.set_num_threads(torch.get_num_threads() + 1)",
        "pillow": 'import warnings; warnings.filterwarnings("ignore", module="PIL")',
    }
    for kind, line in lines.items():
        (tmp_path / f"changes_{kind}.py").write_text(f"{line}\n")
    names = ["math", *(f"changes_{kind}" for kind in lines)]
    assert {name: list(kinds) for name, kinds in changes(names, str(tmp_path), ()).items()} == {
        f"changes_{kind}": [kind] for kind in lines
    }
