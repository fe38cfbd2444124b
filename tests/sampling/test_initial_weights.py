"""Trainings that begin with weights of others: read from whatever holds them, refused by the field that doesn't fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddm_ray import cli
from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.errors import ConfigError, CorruptArtifact, DDMError, MissingArtifact
from ddm_ray.jobs.published import Weights
from ddm_ray.models.spec import spec_of
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.graph import MONOLITH, ROUTER, Artifact, expert
from ddm_ray.run.inputs import beginning_of, beginnings_of
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.sampling.dense_export import save_dense
from ddm_ray.sampling.initial_weights import create_run, load_initial_weights
from ddm_ray.sampling.run_models import load_network
from tests.random_run import make_run

EXPERT = Artifact("beginnings/expert")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("beginnings") / "made"), num_rows=60)


@pytest.fixture(scope="module")
def holders(made: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The monolith, in each form that it can be read from."""
    folder = tmp_path_factory.mktemp("holders")
    DDMPipeline.from_run(made).save_pretrained(folder / "mixture")
    save_dense(DDMPipeline.from_run(made, model="monolith").components, "a card", folder / "dense")
    shutil.copytree(folder / "dense", folder / "again")  # as diffusers saves it: without our fields
    index = json.loads((folder / "again/model_index.json").read_text())
    ours = {name: value for name, value in index.items() if not name.startswith("_ddm_ray")}
    (folder / "again/model_index.json").write_text(json.dumps(ours))
    own = network_of(made, MONOLITH).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in own.items()}, folder / "ours.safetensors")
    return {
        "run": {"source": made.url, "network": "monolith"},
        "dense": {"source": str(folder / "dense")},
        "again": {"source": str(folder / "again")},
        "file": {"source": str(folder / "ours.safetensors")},
        "mixture": {"source": str(folder / "mixture"), "network": "expert 1"},
    }


def network_of(run: Run, artifact: Artifact) -> nn.Module:
    return load_network(run, Weights.finished(run, artifact))


def config_of(init: dict[str, str], *settings: str, part: str = "expert") -> RunConfig:
    return load_recipe("tiny", (f"{part}.train.init_from={json.dumps(init)}", *settings))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("holder", ["run", "dense", "again", "file", "mixture"])
def test_whatever_holds_it_the_weights_are_those(
    made: Run, holders: dict[str, Any], holder: str, tmp_path: Path
) -> None:
    config = config_of(holders[holder])
    run, lacking = create_run(str(tmp_path / "run"), config)
    source = expert(1) if holder == "mixture" else MONOLITH
    loaded = load_initial_weights(run, EXPERT, spec_of(config, "expert"))
    assert not lacking and same(loaded.state_dict(), network_of(made, source).state_dict())
    assert {*map(str, beginnings_of(config))} == {EXPERT}
    assert all(EXPERT in run.inputs(each) for each in (expert(0), expert(1), MONOLITH))
    assert EXPERT not in run.inputs(ROUTER)


def test_identity_is_the_content_wherever_it_was_read(holders: dict[str, Any], made: Run, tmp_path: Path) -> None:
    runs = [
        create_run(str(tmp_path / name), config_of(holders[name]))[0] for name in ("run", "dense", "file", "mixture")
    ]
    identities = [run.identity(expert(0)) for run in runs]
    assert identities[0] == identities[1] == identities[2] != identities[3]
    digests = {run.require(EXPERT).digest for run in runs}
    assert len(digests) == 2
    plain = Run.create(str(tmp_path / "plain"), load_recipe("tiny"))
    assert plain.drift(expert(0), identities[0]) == ["expert.train.init_from: {} -> null"]


def test_each_begins_with_its_namesake_where_there_is_one(made: Run, tmp_path: Path) -> None:
    shutil.copytree(made.url, tmp_path / "source")
    source = Run.open(str(tmp_path / "source"))
    source.store.delete(MONOLITH)
    config = config_of({"source": source.url, "network": "own"}, f'router.train.init_from={{"source": "{source.url}"}}')
    run, lacking = create_run(str(tmp_path / "run"), config)
    assert lacking == ["beginnings/monolith"]
    for job in (*run.experts, ROUTER):
        (copy,) = beginning_of(config, job)
        loaded = load_initial_weights(run, copy, spec_of(config, job.kind))
        assert same(loaded.state_dict(), network_of(source, job).state_dict())
    with pytest.raises(MissingArtifact, match="no finished beginnings/monolith"):
        run.require(Artifact("beginnings/monolith"))
    source.store.delete(expert(1))
    with pytest.raises(MissingArtifact, match=r"^expert\.train\.init_from: .* has no finished experts/001"):
        create_run(str(tmp_path / "other"), config)
    assert not (tmp_path / "other").exists()


def test_a_killed_command_is_finished_by_the_same_one_and_then_asks_no_source(made: Run, tmp_path: Path) -> None:
    shutil.copytree(made.url, tmp_path / "source")
    config = config_of({"source": str(tmp_path / "source"), "network": "monolith"})
    run, _ = create_run(str(tmp_path / "run"), config)
    before = run.store.read(f"{EXPERT}/{NAME}")
    run.store.delete_one(f"{EXPERT}/{NAME}")
    create_run(run.url, config)
    assert run.store.read(f"{EXPERT}/{NAME}") == before
    shutil.rmtree(tmp_path / "source")
    assert create_run(run.url, config)[0].require(EXPERT)
    path = tmp_path / "run" / EXPERT / "ema.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptArtifact, match=r"ema\.safetensors: checksum differs"):
        load_initial_weights(run, EXPERT, spec_of(config, "expert"))


UNFIT = {
    "expert.model.width=64": "has expert.model.width 32, and this run 64",
    "expert.model.analytic_skip=null": "has expert.model.analytic_skip 0.5, and this run null",
    'data.class_names=["a","b"]': "has data.num_classes 10, and this run 2",
    "flow.prediction=noise": "has expert.model.analytic_skip",
}


@pytest.mark.parametrize("setting", UNFIT)
def test_another_network_is_refused_by_its_field(made: Run, setting: str, tmp_path: Path) -> None:
    settings = (setting, "expert.model.analytic_skip=null") if setting.startswith("flow") else (setting,)
    config = config_of({"source": made.url, "network": "monolith"}, *settings)
    with pytest.raises(ConfigError) as caught:
        create_run(str(tmp_path / "run"), config)
    assert str(caught.value).startswith("expert.train.init_from: ") and UNFIT[setting] in str(caught.value)
    assert not (tmp_path / "run" / RUN_FILE).exists()


def test_a_tensor_that_does_not_fit_is_named(holders: dict[str, Any], tmp_path: Path) -> None:
    tensors, file = load_file(holders["file"]["source"]), tmp_path / "file.safetensors"
    save_file({**tensors, "head.bias": torch.zeros(3)}, file)
    with pytest.raises(CorruptArtifact, match=r"^expert\.train\.init_from: .*head\.bias has shape \(3,\), expected"):
        create_run(str(tmp_path / "run"), config_of({"source": str(file)}))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.", "ema.", "module._orig_mod."])
def test_a_prefix_that_all_tensors_share_is_no_part_of_their_names(
    holders: dict[str, Any], tmp_path: Path, prefix: str
) -> None:
    tensors, file = load_file(holders["file"]["source"]), tmp_path / "file.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, file)
    run, _ = create_run(str(tmp_path / "run"), config_of({"source": str(file)}))
    state = load_initial_weights(run, EXPERT, spec_of(run.config, "expert")).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    save_file({f"{prefix}{name}": tensor for name, tensor in tensors.items()} | {"step": torch.zeros(1)}, file)
    with pytest.raises(CorruptArtifact, match="weights lack the tensor"):
        create_run(str(tmp_path / "other"), config_of({"source": str(file)}))


@pytest.mark.parametrize("kind", ["torch", "old torch", "LFS"])
def test_a_file_of_another_kind_is_called_by_its_name(holders: dict[str, Any], tmp_path: Path, kind: str) -> None:
    file, words = tmp_path / "model.pt", "a pickle, which may run code when it is opened; convert it with safetensors"
    if kind == "LFS":
        words = "a pointer of Git LFS, not the file itself; fetch it: git lfs pull"
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    else:
        torch.save(load_file(holders["file"]["source"]), file, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(CorruptArtifact, match=words):
        create_run(str(tmp_path / "run"), config_of({"source": str(file)}))


@pytest.mark.parametrize(
    ("init", "text"),
    [
        ({"source": "{made}"}, "holds several networks: set init_from.network to monolith, 'expert 0' or own"),
        ({"source": "{made}", "network": "expert 7"}, "has no expert 7: its experts are 0 to 1"),
        ({"source": "{made}", "network": "student"}, "has no finished student yet"),
        ({"source": "nothing/here"}, "nothing/here: no run, folder or file of weights is there"),
        ({"source": "{tmp}"}, "holds no network of this run's kind, a DiT"),
        ({"source": "{tmp}/text"}, "not whole safetensors"),
    ],
)
def test_a_source_that_is_none_is_refused(made: Run, init: dict[str, str], text: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    given = {name: value.format(made=made.url, tmp=tmp_path) for name, value in init.items()}
    with pytest.raises(DDMError) as caught:
        create_run(str(tmp_path / "run"), config_of(given))
    assert text in str(caught.value) and str(caught.value).startswith("expert.train.init_from: ")


def test_the_command_begins_with_weights_and_says_what_is_wrong(made: Run, tmp_path: Path) -> None:
    def init(name: str, *settings: str) -> tuple[int, str]:
        words = [word for setting in settings for word in ("--set", setting)]
        done = CliRunner().invoke(cli.main, ["init", str(tmp_path / name), "--recipe", "tiny", *words])
        return done.exit_code, done.output

    source = (f"expert.train.init_from.source={made.url}", "expert.train.init_from.network=monolith")
    code, _ = init("run", *source)
    assert code == 0 and Run.open(str(tmp_path / "run")).require(EXPERT).info["source"] == f"{made.url} monolith"
    code, text = init("other", *source, "expert.model.width=64")
    assert code == 1 and text.count("\n") == 1 and "set" not in text and "expert.model.width 32" in text
    code, text = init("both", "student.start=average", "student.train={steps: 9, batch: 8, init_from: {source: a}}")
    assert code == 1 and "start average and train.init_from both say" in text
