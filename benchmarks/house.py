"""How large the product is, and how many places a change touches, at two commits.

    python benchmarks/house.py [--before COMMIT] [--json PATH]

A line of Python is code, docstring, comment or blank. The places of a change are the files below `ddm_ray/` whose
code, docstrings and comments apart, has a word that such a change would have to add: `ab2` stands for the solvers,
`guidance_interval` for the sampling options, `monolith` for the kinds of artifacts, `webdataset` for the image sources,
`frechet` for the metrics.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import tarfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = {
    "a solver": "ab2",
    "a sampling option": "guidance_interval",
    "a kind of artifact": "monolith",
    "an image source": "webdataset",
    "a metric": "frechet",
}
KINDS = ("code", "docstring", "comment", "blank")


def sources(commit: str) -> dict[str, str]:
    """The product's Python files at a commit, by path."""
    archive = subprocess.run(["git", "archive", commit, "ddm_ray"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [member for member in tar if member.isfile() and member.name.endswith(".py")]
        return {member.name: tar.extractfile(member).read().decode() for member in files}  # type: ignore[union-attr]


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of all lines that a docstring, of a function, class, module or constant, takes."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count(source: str) -> Counter[str]:
    """How many lines of each kind a file has."""
    documented, kinds = docstring_lines(ast.parse(source)), Counter[str]()
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        kind = "docstring" if number in documented else "comment" if text.startswith("#") else "code"
        kinds["blank" if not text else kind] += 1
    return kinds


def has(source: str, word: str) -> bool:
    """True if a file's code, docstrings and comments apart, has a word in any of its names or texts."""
    documented = docstring_lines(ast.parse(source))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return any(
        re.search(rf"(?<![a-z0-9]){word}(?![a-z0-9])", token.string.lower())
        for token in tokens
        if token.type != tokenize.COMMENT and token.start[0] not in documented
    )


def measure(commit: str) -> dict[str, object]:
    """Lines by room and kind, and the files that each kind of change touches."""
    files = sources(commit)
    rooms: dict[str, Counter[str]] = {}
    for path, source in files.items():
        room = path.split("/")[1].removesuffix(".py")
        rooms[room] = rooms.get(room, Counter()) + count(source)
    return {
        "files": len(files),
        "lines": dict(sum(rooms.values(), Counter())),
        "rooms": {room: dict(kinds) for room, kinds in sorted(rooms.items())},
        "places": {change: sorted(p for p, s in files.items() if has(s, word)) for change, word in WORDS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="12370f3", metavar="COMMIT", help="what to compare HEAD with")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures")
    arguments = parser.parse_args()
    sides = {"before": measure(arguments.before), "now": measure("HEAD")}
    before, now = sides["before"], sides["now"]
    print(f"{'':22}{'before':>8}{'now':>8}")
    print(f"{'files':22}{before['files']:8}{now['files']:8}")
    for kind in KINDS:
        print(f"{kind + ' lines':22}{before['lines'].get(kind, 0):8}{now['lines'].get(kind, 0):8}")
    for room in sorted({*before["rooms"], *now["rooms"]}):
        totals = [sum(side["rooms"].get(room, {}).values()) for side in (before, now)]
        print(f"  {room:20}{totals[0]:8}{totals[1]:8}")
    for change in WORDS:
        print(f"{'places of ' + change:30}{len(before['places'][change]):4}{len(now['places'][change]):4}")
        print("    " + ", ".join(path.removeprefix("ddm_ray/") for path in now["places"][change]))
    if arguments.json:
        arguments.json.write_text(json.dumps(sides, indent=1))


if __name__ == "__main__":
    main()
