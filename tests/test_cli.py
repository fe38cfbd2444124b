"""The command line as its user meets it: help that teaches, and mistakes answered in one line."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.cli.fixes import ddm_line
from ddm_ray.data.partition.stage import partition
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.graph import Artifact, shard
from ddm_ray.run.run import Run
from ddm_ray.sampling.arguments import listed
from tests.conftest import BIN, Island, ddm
from tests.data.damage import Folder
from tests.data.rows import commit_rows
from tests.page_blocks import commands_of, pages, words_of
from tests.random_run import make_data, make_run
from tests.sampling import tiny_components
from tests.test_sampling_settings import VALUES

pytestmark = pytest.mark.integration


def files(folder: Path) -> dict[Path, int]:
    """Every file below a folder, with its time of change, but what launches note of themselves."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "launches" not in path.parts)
    return {path: path.stat().st_mtime_ns for path in paths}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs in every unlucky state: empty, data (nothing trained), broken weights, no run at all."""
    folder = tmp_path_factory.mktemp("cli")
    assert CliRunner().invoke(cli.main, ["init", f"{folder}/empty", "--recipe", "tiny"]).exit_code == 0
    make_data(f"{folder}/data", num_rows=60)
    make_data(f"{folder}/crowded", settings=("partition.num_clusters=2",), num_rows=60)
    run = make_run(f"{folder}/broken", num_rows=60)
    info = run.require(Artifact("experts/001")).info
    path = Path(run.url) / "experts/001" / info["weights"] / "ema.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    complete = make_run(f"{folder}/whole", num_rows=60)
    DDMPipeline.from_run(complete).save_pretrained(folder / "exported")
    tiny_components.texts(folder / "tokenizer").save_pretrained(folder / "texts")
    DDMPipeline(tiny_components.models()).save_pretrained(folder / "nameless")
    DDMPipeline(tiny_components.models("nothing")).save_pretrained(folder / "nothing-known")
    (folder / "file").write_text("not a run")
    (folder / "bad.yaml").write_text("islands: {a: {zero_stag: 1}}")
    (folder / "away.yaml").write_text(f"islands: {{a: {{jobs: 'http://127.0.0.1:1', token_file: {folder}/none}}}}")
    (folder / "huge.yaml").write_text("islands: {a: {workers: 99, resources_per_worker: {CPU: 0.5}}}")
    return folder


MISTAKES = {
    "init {d}/x --recipe nothing": "recipe 'nothing' is neither a shipped one (captions-gpu, ddm-24b, digits, ",
    "init {d}/x --recipe tiny --set expert.stepz=3": "expert.stepz: unknown key",
    "init {d}/data --recipe digits": "is another run",
    "init {d}/x --recipe tiny --set data.source={d}/none": "/none': no such folder or file; give a folder, a URI (",
    "init {d}/x --recipe tiny --set data.source={d}/x/": "{d}/x is the folder of its images; give it one of its",
    "init '' --recipe tiny": "RUN is empty",
    "prepare {d}/nothing": "is not a run: it has no run.json; begin one with: ddm init",
    "partition {d}/empty": "has no finished rows yet; make it with: ddm prepare",
    "partition {d}/empty --address h:1 --scratch {d}": "--scratch is for a private Ray: each machine of a cluster has",
    "train {d}/empty expert 0": "has no finished partition/shards/cluster=000 yet; begin with: ddm prepare",
    "train {d}/data expert 9": "this run has experts 0 to 1",
    "train {d}/data expert": "train expert: which one? e.g. expert 0",
    "train {d}/data router 1": "train router: takes no INDEX",
    "train {d}/data router --islands {d}/bad.yaml": "islands.a.zero_stag: unknown key; did you mean zero_stage?",
    "replay {d}/data": "its router is trained on rows (router.replay is 0, not a number of images); begin a run with",
    "replay {d}/data --cluster 2": "--cluster 2: this run has clusters 0 to 1",
    "sample {d}/data": "has no finished experts/000 yet; make it with: ddm train {d}/data all",
    "sample {d}/broken -o {d}/x.png": "experts/001/attempts/0001/weights/step-000000300/ema.safetensors: ",
    "sample {d}/whole --strategy best -o {d}/x.png": "best",
    "sample {d}/whole -o {d}/nowhere/x.png": "name a .png or .jpg or .jpeg or .webp file in a folder that exists",
    "sample {d}/whole -o {d}/x.png --trace {d}/./x.png": "--trace and --out are both {d}/x.png",
    "sample {d}/texts --class 3 -o {d}/x.png": "texts is conditioned on texts; use --prompt",
    "sample {d}/texts -o {d}/x.png": "texts is conditioned on texts: say what to paint with --prompt",
    "sample {d}/nameless -o {d}/x.png": "classes without names: say which with --class, from 0 to 2",
    "sample {d}/nameless --class 3 -o {d}/x.png": "unknown class 3: use a number from 0 to 2",
    "sample {d}/whole --prompt zebra -o {d}/x.png": "unknown class 'zebra': use a name (0, 1",
    "sample {d}/nothing-known --class 0 -o {d}/x.png": "neither classes nor texts: leave out --class and --prompt",
    "export {d}/whole {d}/exported": "exported is a pipeline already: use --overwrite, or another folder",
    "export {d}/whole {d}/data": "data is there and no pipeline of ours",
    "evaluate {d}/whole --name ../x": "use letters, digits",
    "serve {d}/data": "no expert of {d}/data has published weights yet; make it with: ddm train",
    "serve {d}/broken": "ema.safetensors: ",
    "serve {d}/whole --port {port}": "port {port} on 127.0.0.1 is in use; choose another with --port",
    "launch {d}/data --islands {d}/huge.yaml --island b": "no island 'b'; choose some of a with --island",
    "launch {d}/data --islands {d}/huge.yaml": "no island of the file names its Jobs API; give one jobs: http://HEAD",
    "launch {d}/data --islands {d}/away.yaml": "nothing runs on a until what is said above is mended",
    "islands check {d}/data --islands {d}/away.yaml": "1 of 1 islands can't train this run: see above",
    "status {d}": "is not a run",
    "watch {d}/data --once --prometheus {port}": "--once looks once: leave out --prometheus",
    "watch {d}/data --prometheus {port}": "Address already in use; choose another port with --prometheus",
    "watch {d}/data --webhook file:///etc/passwd": "webhook: not an HTTP address; write http://HOST/PATH",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(begun: Path, command: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = {"d": str(begun), "port": taken.getsockname()[1]}
        before = files(begun)
        done = CliRunner().invoke(cli.main, shlex.split(command.format(**words)))
    assert done.exit_code == 1, done.output
    complaint = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(complaint) == 1, done.stderr
    assert MISTAKES[command].format(**words) in complaint[0]
    assert "Traceback" not in done.output
    assert files(begun) == before


@pytest.mark.parametrize("scratch", ["none", "file"])
def test_a_scratch_folder_that_is_none_is_refused_at_once(begun: Path, scratch: str) -> None:
    before = files(begun)
    done = CliRunner().invoke(cli.main, ["partition", f"{begun}/data", "--scratch", f"{begun}/{scratch}"])
    assert (done.exit_code, files(begun)) == (2, before)
    assert re.search(rf"'--scratch': Directory '.*/{scratch}' (does not exist|is a file)", done.stderr)


@pytest.mark.parametrize(
    "command",
    [
        "{d}/whole --prompt 3",
        "{d}/exported --class 3",
        "{d}/texts --prompt cat",
        "{d}/nameless --class 2",
        "{d}/nothing-known",
    ],
)
def test_images_of_all_kinds_of_models(begun: Path, tmp_path: Path, command: str) -> None:
    rest = f" -n 2 --steps 2 -o {tmp_path}/x.png"
    done = CliRunner().invoke(cli.main, shlex.split("sample " + command.format(d=begun) + rest))
    assert done.exit_code == 0, done.output
    assert "x.png: 2 images, seeds 0 to 1" in done.output


def test_a_trace_without_matplotlib_is_refused_before_anything_is_done(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    rest = ["-o", f"{tmp_path}/x.png", "--trace", f"{tmp_path}/y.png"]
    done = CliRunner().invoke(cli.main, ["sample", f"{begun}/whole", *rest])
    assert (done.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert "error: plots need matplotlib" in done.stderr


def test_an_address_without_ray(begun: Path) -> None:
    done = ddm("train", f"{begun}/data", "router", "--address", "127.0.0.1:1", timeout=60)
    assert done.returncode == 75
    assert "error: no Ray to join at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_workers_that_a_private_ray_will_never_have(begun: Path) -> None:
    before = files(begun)
    done = ddm("train", f"{begun}/data", "router", "--islands", f"{begun}/huge.yaml", timeout=90)
    assert done.returncode == 1
    assert re.search(r"^error: placement asks for 99 x 0.5 CPU, Ray has \d+; change workers", done.stderr, re.MULTILINE)
    assert files(begun) == before


def test_workers_that_a_joined_ray_may_get_are_waited_for(begun: Path, ray_cluster: str) -> None:
    """An autoscaling cluster begins small: that is said, and no reason to give up."""
    command = [str(BIN / "ddm"), "train", f"{begun}/data", "router", "--address", ray_cluster]
    with subprocess.Popen([*command, "--islands", f"{begun}/huge.yaml"], stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr
        warning = next(line for line in waiting.stderr if line.startswith("warning: "))
        waiting.terminate()
    assert warning == (
        "warning: placement asks for 99 x 0.5 CPU, Ray has 4; waiting for nodes. If none will come: Ctrl-C, and change"
        " islands.yaml\n"
    )


def test_status_goes_on_past_what_is_damaged(begun: Path) -> None:
    run = Run.open(f"{begun}/crowded")
    run.store.write("partition/_MANIFEST.json", b"{")
    part = min((Path(run.url) / "rows").glob("part-*.parquet"))
    part.write_bytes(b"cut")
    done = CliRunner().invoke(cli.main, ["status", run.url, "--long"])
    assert done.exit_code == 0
    assert re.search(r"partition +damaged .*_MANIFEST.json: not whole", done.output)
    assert re.search(rf"rows +damaged .*{part.name}: gone or cut short; mend it with: ddm doctor", done.output)
    assert re.search(r"monolith +(waiting|damaged)", done.output)


def test_doctor_mends_by_the_commands_that_it_names(island: Island, tmp_path: Path) -> None:
    run = commit_rows(str(tmp_path / "it's; mine"))
    partition(run)
    before = Folder(Path(run.url))
    line = ddm_line("partition", run.url)
    (Path(run.url) / shard(0) / "train-00000.parquet").unlink()
    advised = ddm("doctor", run.url)
    assert advised.returncode == 1 and f"--mend deletes its record, then: {line}\n" in advised.stdout
    mended = ddm("doctor", run.url, "--mend", RAY_ADDRESS=island.ray)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert f"now: {line}\n" in mended.stdout
    assert before.now() == before.files


def test_settings_of_sampling_reach_the_picture(begun: Path, tmp_path: Path) -> None:
    """Every setting by its flag."""
    flags = []
    for name, value in VALUES.items():
        flags += [f"--{name.replace('_', '-')}", *map(str, listed(value))]
    plain = ["--steps", "2", "--strategy", "full"]
    pictures = []
    for words in (plain, flags, [*plain, "--guidance-scale", "3"]):
        out = tmp_path / "x.png"
        done = CliRunner().invoke(cli.main, ["sample", f"{begun}/whole", "--class", "3", "-o", str(out), *words])
        assert done.exit_code == 0, done.output
        pictures.append(out.read_bytes())
    assert len(set(pictures)) == 3


@pytest.mark.parametrize("verb", sorted(cli.main.commands))
def test_help_teaches_by_example(verb: str) -> None:
    done = CliRunner().invoke(cli.main, [verb, "--help"])
    assert done.exit_code == 0
    assert f"ddm {verb} " in done.output or verb == "demo"
    assert "ddm " in done.output.split("\n\n", 1)[1]


def test_every_command_of_the_pages_parses(tmp_path: Path) -> None:
    lines = [line for page in pages() for line in commands_of(page) if line.startswith("ddm ")]
    assert len(lines) >= 150
    for line in lines:
        _, verb, *arguments = words_of(line.replace("/mnt/nvme", str(tmp_path)))
        if verb.startswith("-"):
            continue
        command: click.Command = cli.main.commands[verb]
        if isinstance(command, click.Group) and arguments:
            verb, *arguments = arguments
            command = command.commands[verb]
        command.make_context(verb, arguments, parent=click.Context(cli.main), resilient_parsing="--help" in arguments)
