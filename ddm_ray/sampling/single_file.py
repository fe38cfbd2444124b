"""One file of Python out of modules of ours and all that they import of ours, for those who don't have ddm-ray.

Diffusers fetches one file of code for each component of a pipeline, and nothing that this imports from beside it.
"""

import ast
import builtins
import importlib
import inspect
import symtable
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import ddm_ray

HEAD = '''"""{module} of ddm-ray {version} (Apache-2.0) and the modules of it that this one needs, as one file."""
'''


def single_file(module: str, *others: str) -> str:
    """Source of a module below those of the others, and of all that they import of ours, as they stand.

    AssertionError where a name means one thing in one of these modules and another in the next, or a builtin elsewhere.
    """
    meanings: dict[str, Any] = dict(vars(builtins))
    parts = [HEAD.format(module=module, version=ddm_ray.__version__)]
    modules: list[ModuleType] = []
    for name in (*others, module):
        _add_in_order(name, modules)
    for each in modules:
        source = inspect.getsource(each)
        for symbol in symtable.symtable(source, each.__name__, "exec").get_symbols():
            if symbol.is_assigned() or symbol.is_imported():
                name = symbol.get_name()
                meaning = getattr(each, name)
                assert meanings.setdefault(name, meaning) is meaning, f"{each.__name__}: {name} has two meanings"
        lines = source.splitlines()
        for node in reversed([*_imports(source)]):
            del lines[node.lineno - 1 : node.end_lineno]
        rule = f"# {each.__name__} ".ljust(120, "-")
        parts.append(f"{rule}\n\n" + "\n".join(lines).strip() + "\n")
    return "\n\n".join(parts)


def _add_in_order(name: str, before: list[ModuleType]) -> None:
    """Add our modules that this one needs, and itself, each after those that it needs."""
    module = importlib.import_module(name)
    for node in _imports(inspect.getsource(module)):
        assert node.module is not None
        _add_in_order(node.module, before)
    if module not in before:
        before.append(module)


def _imports(source: str) -> Iterator[ast.ImportFrom]:
    """Imports of ours, all of which are names from a module, under their own names, at the top of the source."""
    top = ast.parse(source)
    for node in ast.walk(top):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == ddm_ray.__name__):
            assert node in top.body and not any(alias.asname for alias in node.names), ast.unparse(node)
            yield node
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == ddm_ray.__name__ for alias in node.names), ast.unparse(node)
