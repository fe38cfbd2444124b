"""Names and words in the rooms that a reader comes to first."""

import ast
import re
from collections import defaultdict
from collections.abc import Mapping

import pytest

from tests.test_layers import modules

# Rooms that share no name of a public function with another part (verbs of the command line apart), nor say FOREIGN.
# So do the modules at the top of the package. The command line says nothing of FOREIGN, too.
PLAIN = ("config", "core", "models", "sampling", "store", "run", "jobs", "islands", "watch", "train")
FOREIGN = re.compile(r"\b(?i:whoever|whose|nobody|anew|is told|is had)\b|\bMOST_")


def is_plain(module: str) -> bool:
    """True for a module of a plain room, and for one at the top of the package."""
    return "." not in module or module.split(".")[0] in PLAIN


def repeated_functions(trees: Mapping[str, ast.Module]) -> list[str]:
    """Public functions of plain modules that several modules define, with the modules' names."""
    homes = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body if not module.startswith("cli.") else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    plain = {name: home for name, home in homes.items() if any(map(is_plain, home))}
    return [f"{name}: {', '.join(home)}" for name, home in plain.items() if len(home) > 1]


def test_a_function_of_a_plain_room_has_its_name_alone() -> None:
    repeated = repeated_functions({name: ast.parse(file.read_text()) for name, file in modules().items()})
    assert not repeated, "\n".join(repeated)


def test_plain_rooms_say_it_plainly() -> None:
    files = {name: file for name, file in modules().items() if is_plain(name) or name.startswith("cli.")}
    lines = [f"{name}: {line}" for name, file in files.items() for line in file.read_text().splitlines()]
    assert [line for line in lines if FOREIGN.search(line)] == []


def test_a_function_of_the_same_name_would_be_found() -> None:
    tree = ast.parse("def load(): pass\ndef _private(): pass")
    assert repeated_functions({"core.a": tree, "data.b": tree, "cli.c": tree}) == ["load: core.a, data.b"]
    assert repeated_functions({"errors": tree, "data.b": tree}) == ["load: errors, data.b"]
    assert (
        repeated_functions({"core.a": tree, "cli.c": tree})
        == repeated_functions({"data.a": tree, "data.b": tree})
        == []
    )


@pytest.mark.parametrize("line", ["# Whoever calls", "MOST_ROWS = 3", "rows whose sum", "chosen anew"])
def test_a_foreign_word_would_be_found(line: str) -> None:
    assert FOREIGN.search(line)
