"""Imports point down, Ray and DeepSpeed stay at the rim, files stay short, and names say something."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("ddm_ray", "tests", "jobs", "serving", "benchmarks")
MOST_LINES = 350
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}

BESIDE = {"errors", "config", "placement", "storage"}
SAMPLING = BESIDE | {"core", "models", "sampling"}
RIM = SAMPLING | {"data", "train", "serve", "islands", "evaluate", "ray_session", "progress", "watch"}
# What each part of ddm_ray may import from the others; a part that isn't here has no floor yet.
BELOW: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "config": {"errors"},
    "placement": {"errors", "config"},
    "memory": set(),
    "storage": {"errors", "config"},
    "ray_session": BESIDE,
    "progress": BESIDE,
    "watch": BESIDE | {"progress"},
    "core": {"errors"},
    "models": {"errors", "config", "core"},
    "sampling": BESIDE | {"core", "models"},
    "data": SAMPLING | {"memory"},
    "train": SAMPLING | {"data", "memory"},
    "serve": SAMPLING | {"data", "ray_session"},
    "islands": SAMPLING | {"data", "train"},
    "evaluate": SAMPLING | {"data"},
    "pipeline": SAMPLING,
    "demo": RIM | {"pipeline"},
    "cli": RIM | {"pipeline", "demo"},
}
STDLIB_ONLY = {"__init__", "errors", "memory"}
WITHOUT_TORCH = STDLIB_ONLY | {"config", "placement", "storage", "progress", "watch"}
DEEPSPEED = {"train.engine"}
# Where Ray is the point. The command line imports it through these and `ray_session` alone.
RAY = {
    "ray_session",
    "data.prepare",
    "train.launch",
    "train.fit",
    "train.recovery",
    "islands.jobs",
    "islands.conduct",
    "serve.painter",
    "serve.deployments",
    "serve.api",
    "serve.app",
}
ABOVE = {"tests", "jobs", "serving", "benchmarks"}


def imports(source: str, package: str) -> Iterator[str]:
    """Dotted names of all modules imported anywhere in the source of a module of `package`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base += [node.module] if node.module else []
            # `from ddm_ray import config` imports a module, `from ddm_ray.config import x` a name in one.
            yield from (".".join([*base, alias.name]) for alias in node.names)


def violations(module: str, source: str) -> list[str]:
    """What a module of ddm_ray, named below the package (`core.flow`), imports against the rules."""
    part = module.split(".")[0]
    if part not in BELOW:
        return [f"{module}: ddm_ray/{part} has no floor; give it one in tests/test_layers.py"]
    package = ".".join(["ddm_ray", *module.split(".")[:-1]])
    found = []
    for name in imports(source, package):
        library, _, rest = name.partition(".")
        if library == "ddm_ray":
            other = rest.split(".")[0]
            wrong = other in BELOW and other not in BELOW[part] | {part}
        else:
            wrong = (
                library in ABOVE
                or (library == "ray" and module not in RAY)
                or (library == "deepspeed" and module not in DEEPSPEED)
                or (library == "torch" and part in WITHOUT_TORCH)
                or (part in STDLIB_ONLY and library not in sys.stdlib_module_names)
                or (part == "core" and library not in sys.stdlib_module_names | core_libraries(module))
            )
        if wrong:
            found.append(f"{module} imports {name}")
    return found


def core_libraries(module: str) -> set[str]:
    # Libraries of compiled code whose mathematics is theirs to know.
    return {"torch", "numpy"} | {"core.kmeans": {"faiss", "scipy"}, "core.balance": {"scipy"}}.get(module, set())


def modules() -> dict[str, Path]:
    """Files of the package by module name below ddm_ray."""
    files = sorted((ROOT / "ddm_ray").rglob("*.py"))
    return {".".join(file.relative_to(ROOT / "ddm_ray").with_suffix("").parts): file for file in files}


def python_files() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def test_imports_point_down() -> None:
    assert {"__init__", "config.run", "storage.run"} <= modules().keys()
    found = [line for name, file in modules().items() for line in violations(name, file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.flow", "import ddm_ray.models.dit"),
        ("core.flow", "from ddm_ray.config import RunConfig"),
        ("core.flow", "from ..storage import run"),
        ("core.flow", "import pydantic"),
        ("core.flow", "import faiss"),
        ("models.dit", "from ddm_ray.storage.run import Run"),
        ("models.dit", "from ddm_ray import sampling"),
        ("sampling.driver", "from ddm_ray.data.loader import Rows"),
        ("sampling.driver", "def sample():\n    import ray"),
        ("storage.run", "from torch import Tensor"),
        ("storage.run", "import ray.data"),
        ("config", "import ddm_ray.core.routing"),
        ("data.loader", "from ray.data import Dataset"),
        ("data.loader", "from ddm_ray.train.job import TrainJob"),
        ("watch.loop", "from ddm_ray.train import telemetry"),
        ("watch.loop", "import ray"),
        ("serve.api", "from ddm_ray.train import state"),
        ("serve.api", "if True:\n    from ..train.state import load"),
        ("train.worker", "import deepspeed.utils"),
        ("train.engine", "import ray"),
        ("evaluate.run", "from ddm_ray.pipeline import DDMPipeline"),
        ("pipeline", "from ddm_ray.cli import main"),
        ("pipeline", "import ray"),
        ("cli", "from tests.random_run import make_run"),
        ("errors", "import yaml"),
        ("__init__", "import numpy"),
        ("core.__init__", "from ..models import dit"),
        ("__init__", "from .config import RunConfig"),
        ("novelty.thing", "import os"),
    ],
)
def test_an_import_that_points_up_would_be_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "core.flow",
            "import math\nfrom torch import Tensor\nfrom ddm_ray.errors import DataError\nfrom . import x",
        ),
        ("core.kmeans", "import faiss"),
        ("sampling.checkpoint", "from ddm_ray.storage.run import Run\nfrom ddm_ray.models import weights"),
        ("train.engine", "import deepspeed\nfrom ddm_ray import config"),
        ("train.launch", "import ray.train.torch\nfrom ddm_ray.data.loader import Rows"),
        (
            "serve.app",
            "from ray import serve\nfrom ddm_ray.serve.api import API\nfrom ddm_ray import __version__",
        ),
        ("cli", "from ddm_ray import demo, pipeline"),
    ],
)
def test_an_import_that_points_down_is_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (name, unwanted)
        for name, unwanted in {
            "__init__": ("torch", "numpy", "ray", "pydantic"),
            "storage.run": ("torch", "ray"),
            "storage.attempts": ("torch", "ray"),
            "watch.loop": ("torch", "ray"),
            "config.__init__": ("torch", "ray", "pyarrow"),
            "placement": ("torch", "ray", "pyarrow"),
            "pipeline": ("ray", "deepspeed"),
            "evaluate.run": ("ray", "deepspeed"),
            "cli.__init__": ("torch", "ray"),
        }.items()
    ],
)
def test_importing_loads_nothing_heavy(module: str, unwanted: tuple[str, ...]) -> None:
    assert module in modules()
    name = f"ddm_ray.{module}".removesuffix(".__init__")
    script = f"import sys, {name}; print(*(set({unwanted!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("file", python_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_files_are_short_and_their_names_say_something(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MOST_LINES
    assert not {part.lower() for part in file.relative_to(ROOT).with_suffix("").parts} & EMPTY_NAMES
