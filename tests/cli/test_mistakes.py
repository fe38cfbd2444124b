"""A mistake on the command line is named at once: before torch is imported, which takes seconds."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.run.run import Run
from tests.conftest import ROOT
from tests.random_run import make_run

pytestmark = pytest.mark.contract

MISTAKES = [
    *(f"{verb} {{nowhere}}" for verb in ("append", "doctor", "evaluate", "partition", "plan", "prepare", "replay")),
    *(f"{verb} {{nowhere}}" for verb in ("sample", "serve", "status", "tidy", "watch")),
    *(f"{verb} {{empty}}" for verb in ("evaluate", "replay", "sample", "serve")),
    *(f"export {place} {{tmp}}/exported" for place in ("{nowhere}", "{empty}")),
    *(f"train {place} all" for place in ("{nowhere}", "{empty}")),
    "append {run} expert.train.steps=many",
    "append {run} sampling.steps=3",
    "compare {nowhere}",
    "compare {run}",
    "compare {run} --features kind",
    "compare {run} --output {tmp}",
    "compare {run}@nameless",
    "doctor {run} --islands {tmp}/none.yaml --island x",
    "evaluate {run} --name 'a b'",
    "export {run} {tmp}/exported --license 'a b'",
    "export {run} {tmp}/exported --model student",
    "export {run} {run}",
    "extend {run} expert.train.steps=many",
    "launch {run} --islands {tmp}/none.yaml",
    "partition {run} --cluster 0",
    "prepare {run} --islands {tmp}/none.yaml",
    "prepare {run} --max-rejected nan",
    "replay {run} --cluster 99",
    "sample {run} --class 99",
    "sample {run} --class unheard-of",
    "sample {run} --device tpu",
    "sample {run} --model student",
    "sample {run} --num 4 --per-class 4",
    "sample {run} --num 1000000000",
    "sample {run} --per-class 20000",
    "sample {run} --seed -1",
    "sample {run} --steps 1000000000",
    "sample {run} --out {tmp}/picture.gif",
    "sample {run} --steps 0",
    "sample {run} --strategy unheard-of",
    "serve {run} --allow-origin localhost:3000",
    "serve {run} --dense student",
    "serve {run} --device cuda:0 --address auto",
    "serve {run} --device tpu",
    "serve {run} --host ''",
    "serve {run} --host 0.0.0.0",
    "serve {run} --host no.such.host.invalid",
    "serve {run} --pin-file {tmp}/made/run.json",
    "serve {run} --port {port}",
    "serve {run} --refresh-s nan",
    "serve {run} --replicas 0",
    "serve {run} --token-file {tmp}/none",
    "train {run} expert 99",
    "watch {run} --every nan",
    "watch {run} --every 1e308",
    "watch {run} --stalled-after nan",
    "work {run} --island a --only unheard-of",
]
WITHOUT_TORCH = """
import contextlib, io, json, shlex, sys

sys.modules["torch"] = None  # to import it is an ImportError
from ddm_ray.cli import main

for line in sys.stdin:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            main(shlex.split(line))
            code = 0
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, errors.getvalue()]))
"""


def test_a_mistake_is_named_without_torch(tmp_path: Path) -> None:
    """One process makes all of these mistakes; each ends with a line of its own and the code of a mistake."""
    made = make_run(str(tmp_path / "made"), num_rows=60)
    empty = Run.create(str(tmp_path / "empty"), load_recipe("tiny"))
    places = {"run": made.url, "empty": empty.url, "nowhere": tmp_path / "nowhere", "tmp": tmp_path}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lines = [mistake.format(**places, port=taken.getsockname()[1]) for mistake in MISTAKES]
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH], input="\n".join(lines), cwd=ROOT, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    for mistake, (code, errors) in zip(MISTAKES, ends, strict=True):
        assert code in (1, 2), (mistake, code, errors)
        last = errors.splitlines()[-1]
        assert last.startswith(("error: ", "Error: ")) and "torch" not in last, (mistake, errors)
