"""Imports point down, Ray and DeepSpeed stay at the rim, files stay short, names and docstrings say something."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ddm_ray.cli import main

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parent.parent
FOLDERS = ("ddm_ray", "tests", "jobs", "serving", "benchmarks", "study", "examples")
MOST_LINES = 350
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
# Words that say how a value came about, not what it is.
EMPTY_WORDS = {"found", "told", "there", "said", "wanted", "whole"}
# A docstring opens with a verb or a noun, not with one of these.
OPENERS = {"What", "Whether", "How", "Those", "That", "Which", "Where", "When", "As", "If", "So", "Its", "They"}
BINDING = {ast.arg: "arg", ast.alias: "asname"} | dict.fromkeys(
    (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs), "name"
)

TEXT = {"parsing", "plain_text", "spelling"}
BESIDE = TEXT | {"errors", "remedies", "submitted", "config", "placement", "store", "run", "jobs"}
SAMPLING = BESIDE | {"core", "models", "pictures", "sampling"}
RIM = SAMPLING | {"data", "train", "serve", "islands", "evaluate", "private_folder", "ray_session", "watch"}
# What each part of ddm_ray may import from the others.
BELOW: dict[str, set[str]] = {
    **{
        name: set() for name in (*sorted(TEXT), "__init__", "environment", "memory", "remedies", "signals", "submitted")
    },
    "errors": {"remedies", "spelling"},
    "exit_codes": {"errors"},
    "config": {"errors", "plain_text", "remedies", "spelling"},
    "placement": {"errors", "remedies", "spelling", "submitted", "config"},
    "cores": {"memory"},
    "pictures": {"errors", "spelling"},
    "store": {"errors", "remedies", "parsing", "spelling"},
    "run": {"errors", "remedies", "parsing", "spelling", "config", "store"},
    "jobs": {"errors", "remedies", "parsing", "spelling", "config", "store", "run"},
    "ray_internals": {"errors"},
    "private_folder": {"spelling", "store"},
    "ray_session": BESIDE | {"cores", "environment", "private_folder", "ray_internals"},
    "watch": BESIDE,
    "core": {"errors", "spelling"},
    "models": TEXT | {"errors", "remedies", "config", "core"},
    "sampling": BESIDE | {"core", "models", "pictures"},
    "data": SAMPLING | {"environment", "memory"},
    "train": SAMPLING | {"data", "cores", "environment", "memory", "ray_session", "ray_internals"},
    "serve": SAMPLING | {"data", "ray_session", "ray_internals", "signals"},
    "islands": SAMPLING | {"data", "cores", "memory", "train", "ray_internals"},
    "evaluate": SAMPLING | {"data", "train"},
    "pipeline": SAMPLING,
    "demo": RIM | {"cores", "pipeline"},
    "cli": RIM | {"cores", "environment", "exit_codes", "pipeline", "demo", "signals"},
}
# The tables that configuration and mathematics share; torch-free, as both their readers need them.
TABLES = {"core.names", "core.solvers"}
STDLIB_ONLY = {"__init__", "cores", "errors", "exit_codes", "memory", "remedies", "submitted"} | TEXT
STDLIB_ONLY |= TABLES | {"environment", "signals"}
WITHOUT_TORCH = STDLIB_ONLY | {"config", "placement", "store", "run", "jobs", "watch"}
DEEPSPEED = {"train.deepspeed_setup"}
# Where Ray is the point. The command line imports it through these and `ray_session` alone.
RAY = {
    *("ray_session", "data.sharded.ray_data", "data.partition.ray_data", "islands.machines"),
    *(
        f"train.ray.{name}"
        for name in ("train_all", "driver", "fit", "leaving", "losses_of_workers", "preloaded", "room", "world")
    ),
    *(f"serve.cluster.{name}" for name in ("app", "codec", "direct_ingress", "expert_replica", "ingress", "mixture")),
    *(f"serve.cluster.{name}" for name in ("remote_runner", "replicas", "server", "start")),
}
ABOVE = {"tests", "jobs", "serving", "benchmarks", "study", "ddm_ray_study"}


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
    wrong_imports = []
    for name in imports(source, package):
        library, _, rest = name.partition(".")
        if library == "ddm_ray":
            other = rest.split(".")[0]
            shared = part == "config" and rest.rpartition(".")[0] in TABLES
            wrong = module in TABLES or (other in BELOW and other not in BELOW[part] | {part} and not shared)
        else:
            wrong = (
                library in ABOVE
                or (library == "ray" and module not in RAY)
                or (library == "deepspeed" and module not in DEEPSPEED)
                or (library == "torch" and part in WITHOUT_TORCH)
                or ({part, module} & STDLIB_ONLY and library not in sys.stdlib_module_names)
                or (part == "core" and library not in sys.stdlib_module_names | core_libraries(module))
            )
        if wrong:
            wrong_imports.append(f"{module} imports {name}")
    return wrong_imports


def core_libraries(module: str) -> set[str]:
    # Libraries of compiled code whose mathematics is theirs to know.
    of_module = {"core.kmeans": {"scipy", "threadpoolctl"}, "core.balance": {"scipy"}}
    return {"torch", "numpy"} | of_module.get(module, set())


def modules() -> dict[str, Path]:
    """Files of the package by module name below ddm_ray."""
    files = sorted((ROOT / "ddm_ray").rglob("*.py"))
    return {".".join(file.relative_to(ROOT / "ddm_ray").with_suffix("").parts): file for file in files}


def python_files() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def test_imports_point_down() -> None:
    assert {"__init__", "config.run", "run.run"} <= modules().keys()
    wrong_imports = [line for name, file in modules().items() for line in violations(name, file.read_text())]
    assert not wrong_imports, "\n".join(wrong_imports)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.flow", "import ddm_ray.models.dit"),
        ("core.flow", "from ddm_ray.config import RunConfig"),
        ("core.flow", "from ..run import run"),
        ("core.flow", "import pydantic"),
        ("core.flow", "import faiss"),
        ("models.dit", "from ddm_ray.run.run import Run"),
        ("models.dit", "from ddm_ray import sampling"),
        ("sampling.driver", "from ddm_ray.data.loading.loader import Rows"),
        ("sampling.driver", "def sample():\n    import ray"),
        ("run.run", "from torch import Tensor"),
        ("run.run", "import ray.data"),
        ("config", "import ddm_ray.core.routing"),
        ("config", "from ddm_ray.core import names_of_others"),
        ("core.names", "import torch"),
        ("core.names", "from ddm_ray.errors import ConfigError"),
        ("run.run", "from ddm_ray.core.solvers import SolverName"),
        ("data.loading.loader", "from ray.data import Dataset"),
        ("data.loading.loader", "from ddm_ray.train.job import TrainJob"),
        ("watch.loop", "from ddm_ray.train import telemetry"),
        ("watch.loop", "import ray"),
        ("serve.cluster.ingress", "from ddm_ray.train import state"),
        ("serve.cluster.ingress", "if True:\n    from ...train.state import load"),
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
        ("core.kmeans", "import threadpoolctl"),
        ("config.sampling", "from ddm_ray.core.solvers import SolverName"),
        ("sampling.run_models", "from ddm_ray.run.run import Run\nfrom ddm_ray.models import weights"),
        ("train.deepspeed_setup", "import deepspeed\nfrom ddm_ray import config"),
        ("train.ray.train_all", "import ray.train.torch\nfrom ddm_ray.data.loading.loader import Rows"),
        (
            "serve.cluster.app",
            "from ray import serve\nfrom ddm_ray.serve.cluster.ingress import API\nfrom ddm_ray import __version__",
        ),
        ("cli", "from ddm_ray import demo, pipeline"),
    ],
)
def test_an_import_that_points_down_is_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


def phrases(source: str) -> list[str]:
    """Strings of a module, its docstrings included, that name a verb of the command line or an option."""
    verbs = "|".join(sorted(main.commands))
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    pattern = re.compile(rf"\bddm ({verbs})\b|(?<![\w-])--[a-z]")
    return [string for string in strings if isinstance(string, str) and pattern.search(string)]


def test_only_the_command_line_knows_its_verbs_and_options() -> None:
    below = {name: file for name, file in modules().items() if not name.startswith("cli.")}
    misplaced = [f"{name}: {string[:80]!r}" for name, file in below.items() for string in phrases(file.read_text())]
    assert not misplaced, "\n".join(misplaced)


@pytest.mark.parametrize("source", ['f"{x}; run ddm train {x}"', '"choose one with --island"', 'f"--set {x}"'])
def test_a_phrase_of_the_command_line_would_be_found(source: str) -> None:
    assert len(phrases(source)) == 1


@pytest.mark.parametrize(
    ("unwanted", "names"),
    {
        ("torch", "numpy", "ray", "pydantic"): ["__init__"],
        ("torch", "ray", "pyarrow", "pydantic"): ["data.prepare.decoder"],
        ("torch", "ray", "pyarrow"): ["config.__init__", "placement"],
        ("torch", "ray"): [
            *("run.run", "jobs.attempts", "watch.loop", "islands.choose", "data.prepare.decoding"),
            *("data.prepare.stage", "cli.__init__"),
        ],
        ("torch",): ["data.sharded.ray_data"],
        ("torch", "ray.train"): ["train.ray.train_all"],
        ("ray", "deepspeed"): ["pipeline", "evaluate.run", "train.worker"],
    }.items(),
)
def test_importing_loads_nothing_heavy(unwanted: tuple[str, ...], names: list[str]) -> None:
    """Modules of a line are imported one after the other, in one process."""
    assert {*names} <= modules().keys()
    imported = [f"ddm_ray.{name}".removesuffix(".__init__") for name in names]
    lines = [f"import {name}; print(*({{*{unwanted!r}}} & sys.modules.keys()))" for name in imported]
    script = "\n".join(["import sys", *lines])
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert dict(zip(imported, done.stdout.splitlines(), strict=True)) == dict.fromkeys(imported, "")


def test_files_are_short_and_their_names_say_something() -> None:
    files = python_files()
    assert len(files) > 300
    assert [str(file) for file in files if len(file.read_text().splitlines()) > MOST_LINES] == []
    names = {file: {part.lower() for part in file.relative_to(ROOT).with_suffix("").parts} for file in files}
    assert [str(file) for file, parts in names.items() if parts & EMPTY_NAMES] == []


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """All files, parsed once."""
    return {file: ast.parse(file.read_text()) for file in python_files()}


def bound_empty_words(tree: ast.Module) -> list[str]:
    """Variables, arguments, attributes, functions and classes of a module under EMPTY_WORDS, each after its line."""
    bound: list[tuple[int, str | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            bound.append((node.lineno, node.id if isinstance(node, ast.Name) else node.attr))
        elif type(node) in BINDING:
            bound.append((getattr(node, "lineno", 0), getattr(node, BINDING[type(node)])))
    return [f"{line}: {name}" for line, name in bound if name and name.strip("_") in EMPTY_WORDS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_say_what_a_value_is(trees: dict[Path, ast.Module], folder: str) -> None:
    files = [file for file in trees if file.is_relative_to(ROOT / folder)]
    empty = [f"{file.relative_to(ROOT)}:{word}" for file in files for word in bound_empty_words(trees[file])]
    assert not empty, "\n".join(empty)


@pytest.mark.parametrize(
    "source",
    [
        "[a for a, (_said, b) in c if a]",
        "import x as found",
        "try: pass\nexcept E as whole: pass",
        "match x:\n    case [wanted, *_]: pass",
        "x._told = 1",
        "class X:\n    there: int",
        "class X:\n    async def _found(self): pass",
        "class said: pass",
        "lambda *, told: 1",
    ],
)
def test_an_empty_word_would_be_found(source: str) -> None:
    assert len(bound_empty_words(ast.parse(source))) == 1


def test_an_empty_word_that_binds_nothing_is_allowed() -> None:
    assert bound_empty_words(ast.parse('"""The whole."""\nfound_rows = f(x.said, told=1)')) == []


def repeated_classes(trees: Mapping[str, ast.Module]) -> list[str]:
    """Public classes that several modules define, with the modules' names."""
    homes = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return [f"{name}: {', '.join(home)}" for name, home in homes.items() if len(home) > 1]


def test_a_class_has_its_name_alone(trees: dict[Path, ast.Module]) -> None:
    repeated = repeated_classes({name: trees[file] for name, file in modules().items()})
    assert not repeated, "\n".join(repeated)


def test_a_class_of_the_same_name_would_be_found() -> None:
    tree = ast.parse("class Rows: pass\nclass _Private: pass")
    assert repeated_classes({"a": tree, "b": ast.parse("class Loader: pass"), "c.d": tree}) == ["Rows: a, c.d"]


def unclear_docstrings(tree: ast.Module) -> list[str]:
    """Docstrings, also those below assignments, that open with one of OPENERS, each after its line."""
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = [(value.lineno, value.value) for value in values if isinstance(value, ast.Constant)]
    opener = re.compile(rf"\s*({'|'.join(OPENERS)})\b")
    return [f"{line}: {text[:80]}" for line, text in texts if isinstance(text, str) and opener.match(text)]


def test_docstrings_open_with_a_verb_or_a_noun(trees: dict[Path, ast.Module]) -> None:
    unclear = [f"{name}:{line}" for name, file in modules().items() for line in unclear_docstrings(trees[file])]
    assert not unclear, "\n".join(unclear)


@pytest.mark.parametrize(
    "source",
    ['"""What it costs."""', 'class X:\n    def f():\n        """\n        As, in X, `g`."""', 'X = 3\n"""Those."""'],
)
def test_an_unclear_docstring_would_be_found(source: str) -> None:
    assert len(unclear_docstrings(ast.parse(source))) == 1


def test_a_clear_docstring_is_allowed() -> None:
    assert unclear_docstrings(ast.parse('"""Assign rows. What else."""\nx = "What"')) == []
