"""A newcomer's first commands: init, recipes, fields; and what each command says comes next."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddm_ray import cli
from ddm_ray.cli.fixes import by, next_of
from ddm_ray.cli.recipes import page
from ddm_ray.config import load_recipe, read_yaml, recipe_names
from ddm_ray.errors import DataError
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.launches import Launch, noted
from ddm_ray.models import hub
from ddm_ray.remedies import Resume
from ddm_ray.run.graph import ROUTER
from ddm_ray.run.run import Run
from tests.conftest import ROOT
from tests.data.sources.test_sources import write_folder
from tests.jobs.attempts import beat, finish
from tests.random_run import make_data
from tests.test_layers import modules

pytestmark = pytest.mark.contract


def ddm(*words: str) -> Result:
    return CliRunner().invoke(cli.main, list(words))


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of class folders, `photos`, in the current folder."""
    write_folder(tmp_path / "photos", 60)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


INIT = ("init", "run", "--recipe", "photos-cpu")


def test_init_says_what_it_found_and_keeps_the_source_for_every_folder(photos: Path) -> None:
    done = ddm(*INIT)
    assert done.exit_code == 0, done.output
    assert f"{photos}: 60 .png, " in done.output and "images looked at: 8 x 8 pixels" in done.output
    assert "its folders (blue, green, red) are one class; each is its own with --set data.num_classes=3" in done.output
    assert "warning: half of them are smaller than the 32 pixels" in done.stderr
    assert done.output.endswith("next: ddm prepare run\n")
    assert json.loads((photos.parent / "run/run.json").read_text())["config"]["data"]["source"] == str(photos)


def test_init_may_be_repeated_until_something_is_made(photos: Path) -> None:
    assert ddm(*INIT).exit_code == 0
    before = Path("run/run.json").read_bytes()
    same = ddm(*INIT)
    assert (same.exit_code, Path("run/run.json").read_bytes()) == (0, before) and "replaces" not in same.output
    changed = ddm(*INIT, "--set", "data.num_classes=3", "--set", "embedder.dim=8")
    assert changed.exit_code == 0, changed.output
    assert 'replaces the earlier configuration, from which nothing is made yet: data.class_names: ["0"]' in (
        changed.output
    )
    assert "classes: blue 20, green 20, red 20" in changed.output
    assert Run.open("run").config.embedder.dim == 8
    run = Run.open("run")
    run.store.write("rows/_plan/PLAN.json", b"begun")
    refused = ddm(*INIT)
    assert refused.exit_code == 1 and "is another run: " in refused.stderr
    assert Run.open("run").config == run.config
    assert ddm(*INIT, "--set", "data.num_classes=3", "--set", "embedder.dim=8").exit_code == 0


def test_a_run_that_was_begun_with_a_relative_source_is_the_same(photos: Path) -> None:
    run = Run.create("run", load_recipe("photos-cpu"))
    assert run.config.data.source == "photos"
    run.store.write("rows/_plan/PLAN.json", b"begun")
    assert ddm(*INIT).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "data.source=photo"), "/photos?"),
        (
            ("--set", "data.source=photos/red", "--set", "data.num_classes=3"),
            "begin a run with --set data.num_classes=1",
        ),
        (("--set", "data.num_clases=3"), "data.num_clases: unknown key; did you mean data.num_classes?"),
    ],
)
def test_init_refuses_what_will_not_work_and_leaves_nothing(photos: Path, words: tuple[str, ...], message: str) -> None:
    done = ddm(*INIT, *words)
    assert done.exit_code == 1 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not Path("run").exists()


def test_a_source_of_another_machine_and_owners_are_not_looked_at(photos: Path) -> None:
    assert ddm(*INIT, "--set", "data.source=/mnt/elsewhere", "--unseen").exit_code == 0
    owner = ddm("init", "north", "--recipe", "tiny", "--set", "partition.method=given", "--set", "data.source=none")
    assert owner.exit_code == 0, owner.output
    assert ddm("init", "far", "--recipe", "tiny", "--set", "data.source=s3://nobody/photos").exit_code == 0


@pytest.mark.parametrize(
    ("words", "meant"), [(("trian",), "train"), (("island",), "islands"), (("recipes", "shew"), "show")]
)
def test_a_mistyped_verb_is_guessed(words: tuple[str, ...], meant: str) -> None:
    done = ddm(*words)
    assert done.exit_code == 2 and "Did you mean" in done.stderr and f"'{meant}'" in done.stderr


@pytest.mark.parametrize(
    ("words", "near"),
    [(("train", "run", "exprt", "0"), "expert"), (("sample", "run", "--solver", "huen"), "heun")],
)
def test_a_mistyped_choice_of_an_option_is_guessed(words: tuple[str, ...], near: str) -> None:
    done = ddm(*words)
    assert done.exit_code == 2 and done.stderr.strip().endswith(f"; did you mean {near}?")


def test_recipes_are_listed_each_with_what_it_is_for() -> None:
    lines = ddm("recipes").output.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == recipe_names()
    assert all(len(line.split()) > 6 and line.endswith(".") for line in lines[:-1])


@pytest.mark.parametrize("name", ["photos-cpu"])
def test_a_recipe_is_shown_as_a_recipe_with_its_sizes(name: str, tmp_path: Path) -> None:
    shown = ddm("recipes", "show", name).output
    sizes = {"photos-cpu": "# expert: 2 x 1,282,480 parameters, 25.6 MB of memory", "ddm-24b": "8 x 2,984,153,616"}
    assert sizes[name] in shown and "# router: " in shown
    (tmp_path / "mine.yaml").write_text(shown)
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe(name)
    assert isinstance(read_yaml(shown, name), dict)
    wrong = ddm("recipes", "show", "photo-cpu")
    assert wrong.exit_code == 1 and "did you mean photos-cpu?" in wrong.stderr


def test_the_page_of_all_fields_is_that_of_the_types() -> None:
    written = (ROOT / "docs/reference/configuration.md").read_text()
    assert written == page(), "write it again: ddm fields --markdown > docs/reference/configuration.md"
    assert ddm("fields", "--markdown").output == page()
    assert "| `steps` | whole number above 0 | required | " in page()


def test_fields_are_shown_by_a_part_of_their_names() -> None:
    shown = ddm("fields", "train.warmup").output
    assert shown.splitlines()[0] == "expert.train, router.train, student.train"
    assert "warmup_steps       whole number, at least 0; default `0`" in shown and "seed" not in shown
    assert ddm("fields", "zebra").exit_code == 1


def test_after_training_the_next_model_is_named_then_a_look_then_samples(tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), num_rows=60)
    url = run.url
    assert next_of(run, "r") == "ddm train r expert 0"
    finish(run, run.experts[0])
    assert next_of(run, "r") == "ddm train r expert 1"
    with noted(run.store, Launch(run.experts[1])):
        assert next_of(run, "r") == "ddm train r router"
    beat(claim(run.store, ROUTER), 1, 5)
    assert next_of(run, "r") == "ddm status r"
    for artifact in (run.experts[1], ROUTER):
        finish(run, artifact)
    assert next_of(Run.open(url), "r") == "ddm sample r"


@pytest.mark.parametrize("name", ["my run #1", "it's; $HOME", "-x", "a\N{NO-BREAK SPACE}b"])
def test_a_printed_command_can_be_pasted(photos: Path, name: str) -> None:
    _, following = ddm("init", "--recipe", "tiny", "--", name).output.rsplit("next: ", 1)
    script = f"ddm() {{ printf '%s\\n' \"$@\"; }}; {following}"
    read = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    verb, run_url = read.stdout.splitlines()
    assert verb == "prepare" and ddm("status", run_url).exit_code == 0


def test_no_command_with_a_name_is_printed_without_quotes() -> None:
    by_hand = re.compile(r"\bddm [a-z -]*\{")
    assert {name for name, file in modules().items() if by_hand.search(file.read_text())} == set()


MISTAKEN = """
import sys
from click.testing import CliRunner
from ddm_ray.cli import main
for line in sys.argv[1:]:
    done = CliRunner().invoke(main, line.split())
    assert done.exit_code == 1 and done.stderr.count("error: ") == 1, (line, done.output)
    heavy = {"torch", "ray", "deepspeed"} & sys.modules.keys()
    assert not heavy, (line, heavy)
"""


def test_a_mistake_is_refused_before_pytorch_is_imported(tmp_path: Path) -> None:
    verbs = {
        name: command for name, command in cli.main.commands.items() if any(p.name == "run_url" for p in command.params)
    }
    rest = {"train": "all", "export": "x", "work": "--island x", "copy": "x", "extend": "expert.train.steps=2"}
    rest |= {"launch": "--islands x", "accept": "--all"}
    lines = [f"{verb} {tmp_path}/none {rest.get(verb, '')}" for verb in verbs if verb not in ("init", "demo")]
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny"))
    lines += [f"sample {run.url} --strategy bogus", f"sample {run.url} --steps 0", "demo --recipe none"]
    done = subprocess.run([sys.executable, "-c", MISTAKEN, *lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_that_trains_does_not_tell_its_user_to_run_it() -> None:
    assert by("this command")(Resume("r", "router", 7)) == "this command goes on from step 7"
    assert by("this command")(Resume("r", "router", 0)) == "this command starts from step 0"


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        (
            ("embedder.kind=timm",),
            r"^embedder: timm/vit_small_patch14_dinov2\.lvd142m isn't in .*embedder\.checkpoint set",
        ),
        (("embedder={kind: transformers, model: a/b}",), r"^embedder\.model: a/b isn't .* set to a folder that has it"),
        (
            ("data.text={encoder: a/clip, tokens: 8, dim: 8}", "sample.guidance_scale=1"),
            r"^data\.text\.encoder: a/clip ",
        ),
    ],
)
def test_a_network_that_cannot_be_had_is_refused_in_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: tuple[str, ...], lacking: str
) -> None:
    """By the real library, at an address where nobody listens."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=lacking):
        hub.require_hub(load_recipe("tiny", settings))


def test_prepare_without_the_hub_ends_before_anything_is_listed(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(photos.parent / "cache"))
    assert ddm("init", "run", "--recipe", "photos-gpu").exit_code == 0
    done = ddm("prepare", "run")
    assert done.exit_code == 1, done.output
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "isn't in this machine's cache, and " in error and "or with embedder.kind pixels" in error
    assert not Path("run/rows").exists()


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("embedder.kind=timm", "embedder.checkpoint=dino.safetensors"),
        ("embedder.kind=timm", "partition.method=given"),
        ("data.text={encoder: {folder}, tokens: 8, dim: 8}",),
    ],
)
def test_networks_of_files_need_no_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.require_hub(load_recipe("tiny", tuple(each.replace("{folder}", str(tmp_path)) for each in settings)))
