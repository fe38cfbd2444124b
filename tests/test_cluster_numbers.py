"""Clusters whose numbers have gaps: people see and say the numbers, whatever arrays of experts are in order of."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from matplotlib.figure import Figure
from ray.serve._private.build_app import build_app as unfold

from ddm_ray import cli
from ddm_ray.config import load_recipe
from ddm_ray.data.loading.heldout_rows import heldout_rows
from ddm_ray.data.loading.loader import Loader, load_rows
from ddm_ray.data.partition.numbers import size_warnings, unlike
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import SamplingError
from ddm_ray.evaluate import figures, mixture_picture
from ddm_ray.evaluate.run import evaluate
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.graph import PARTITION, expert, replay, shard, shards_of
from ddm_ray.run.info import ClusterFit, PartitionInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.initial_weights import create_run, load_initial_weights
from ddm_ray.sampling.run_models import load_trained
from ddm_ray.serve.cluster.app import build_app
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.engine.versions import Versions
from ddm_ray.train.replay import images_of, make_replay
from tests.data.partition.report_rows import built, groups, made_config
from tests.random_run import make_run
from tests.serve.conftest import replica_of
from tests.serve.http.test_http_app import Served

pytestmark = pytest.mark.contract

NUMBERS = "partition.numbers=[1, 4]"
FEW = ("evaluate.strategies=[once, top-1]", "evaluate.num_samples=40", "sample.steps=3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("numbers") / "run"), settings=(NUMBERS, *FEW), num_rows=200)


def refused(*words: str) -> str:
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == 1
    return done.stderr.removeprefix("error: ").strip()


def test_arrays_have_rows_of_clusters_by_position(run: Run) -> None:
    assert [*run.experts] == ["experts/001", "experts/004"]
    rows = load_rows(run, shards_of(run.config))
    assert rows.cluster_N.bincount().tolist() == list(PartitionInfo.of(run.require(PARTITION)).rows_K)
    assert set(load_rows(run, [shard(4)]).cluster_N.tolist()) == {1}
    assert set(heldout_rows(run, [shard(4)], 5, None).cluster_N.tolist()) == {1}
    with Loader(run, shards_of(run.config), 8, 0) as loader:
        place_B = torch.arange(8)
        batch = loader.batch(0, place_B)
        assert torch.equal(batch.cluster_B, loader.cluster_B(0, place_B)) and set(batch.cluster_B.tolist()) <= {0, 1}


def test_commands_take_numbers_and_name_those_that_there_are(run: Run, tmp_path: Path) -> None:
    assert refused("train", run.url, "expert", "0") == "train expert 0: this run has experts 1, 4"
    assert refused("train", run.url, "expert") == "train expert: which one? e.g. expert 1"
    done = CliRunner().invoke(cli.main, ["train", run.url, "expert", "4"])
    assert done.output.startswith("experts/004: 300 steps")
    owned = make_run(str(tmp_path / "owned"), settings=(NUMBERS, "router.replay=20", "acceptance=by_hand"), num_rows=60)
    assert refused("replay", owned.url, "--cluster", "0") == "--cluster 0: this run has clusters 1, 4"
    assert refused("accept", owned.url, "expert", "0") == "accept expert 0: this run has experts 1, 4"
    assert refused("accept", owned.url, "replay") == "accept replay: of which cluster? 1, 4"


def test_a_pipeline_is_asked_for_numbers_and_answers_with_them(run: Run, tmp_path: Path) -> None:
    pipeline = DDMPipeline.from_run(run)
    asked: dict[str, Any] = {"class_labels": [1, 2, 3], "seeds": 0, "strategy": "oracle", "output_type": "pt"}
    output = pipeline(**asked, clusters=[4, 1, 4])
    assert output.experts_SB.tolist() == [[4, 1, 4]] * 3 and output.clusters == (1, 4)
    with pytest.raises(SamplingError, match="clusters are 0: use whole numbers from 1, 4"):
        pipeline(**asked, clusters=0)
    pipeline.save_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").glob("expert_*")) == ["expert_001", "expert_004"]
    again = DDMPipeline.from_pretrained(tmp_path / "saved")(**asked, clusters=[4, 1, 4])
    assert torch.equal(again.images, output.images) and again.clusters == (1, 4)


def test_the_legend_of_a_plot_has_numbers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, legend = list[str](), Figure.legend

    def noted(figure: Figure, **fields: Any) -> Any:
        labels.extend(handle.get_label() for handle in fields["handles"])
        return legend(figure, **fields)

    monkeypatch.setattr(Figure, "legend", noted)
    output = DDMPipeline.from_run(run)(class_labels=[1, 2], seeds=0, strategy="oracle", clusters=[4, 1])
    output.plot_routing(tmp_path / "plot.png")
    assert labels == ["expert 1", "expert 4"]


@pytest.mark.parametrize("holder", ["run", "exported"])
def test_a_training_begins_with_the_expert_of_that_number(run: Run, tmp_path: Path, holder: str) -> None:
    DDMPipeline.from_run(run).save_pretrained(tmp_path / "exported")
    source = {"run": run.url, "exported": str(tmp_path / "exported")}[holder]

    def config(number: int) -> Any:
        init = json.dumps({"source": source, "network": f"expert {number}"})
        return load_recipe("tiny", (f"experts={{1: {{train: {{init_from: {init}}}}}}}",))

    begun, _ = create_run(str(tmp_path / "begun"), config(4))
    (copy,) = [each for each in begun.inputs(expert(1)) if each.kind == "beginning"]
    loaded = load_initial_weights(begun, copy, {"class": "DiT", "config": load_trained(run, expert(4)).config})
    right = load_trained(run, expert(4)).state_dict()
    assert all(torch.equal(tensor, right[name]) for name, tensor in loaded.state_dict().items())
    with pytest.raises(Exception, match=r"^experts\.1\.train\.init_from: .*(its experts are 1, 4|has no expert_000)"):
        create_run(str(tmp_path / "other"), config(0))


def test_a_replay_is_of_the_number(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), settings=(NUMBERS, "router.replay=20", *FEW), num_rows=60)
    numbers = [images_of(run, cluster) for cluster in (1, 4)]
    assert [*numbers[0], *numbers[1]] == [*range(20)]
    make_replay(run, 4, serial)
    rows = load_rows(run, [replay(4)])
    assert rows.ids[0].startswith("replay/004/") and set(rows.cluster_N.tolist()) == {1}
    counts_C = np.array(PartitionInfo.of(run.require(PARTITION)).counts_CK)[:, 1]
    assert (counts_C[rows.label_N.unique()] > 0).all()


@pytest.fixture(scope="module")
def served(run: Run) -> Iterator[Served]:
    made = Served(run)
    yield made
    made.engine.close()


def test_a_server_names_experts_by_their_numbers(run: Run, served: Served) -> None:
    names = ["expert-001", "expert-004"]
    model = served.ask("GET", f"/v1/models/{run.config.name}").json()
    assert model["experts"] == names
    assert served.ask("GET", "/healthz").json()["weights"].keys() == {*names, "router"}
    painted = served.generate(prompt="", n=8, seed=0, strategy="once").json()["experts"]
    right = DDMPipeline.from_run(run)([""] * 8, seeds=0, strategy="once").experts_SB[0].tolist()
    assert [stretch[0]["expert"] for stretch in painted] == right and {*right} == {1, 4}
    page = served.ask("GET", "/metrics").text
    assert 'ddm_steps_total{expert="expert-004"}' in page and "expert-000" not in page
    assert Versions(run).newest().steps().keys() == {*names, "router"}


def test_deployments_and_replicas_are_of_numbers(run: Run) -> None:
    application = unfold(build_app(ServeArgs(run=run.url, placement="per-expert", device="cpu")), name="app")
    assert [each.name for each in application.deployments if each.name.startswith("expert-")] == [
        "expert-001",
        "expert-004",
    ]
    replica = asyncio.run(replica_of(run, 4))
    (pair,) = replica._engines
    assert pair[0].artifact == expert(4)


def test_an_evaluation_shows_numbers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = list[str]()
    for module, name in ((figures, "GridRow"), (mixture_picture, "TileLine")):
        made = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda label, *others, made=made: labels.append(label) or made(label, *others)
        )
    evaluate(run)
    folder = Path(run.url) / "eval/demo"
    assert json.loads((folder / "metrics.json").read_text())["clusters"] == [1, 4]
    assert {"cluster 1, real", "expert 1", "cluster 4, real", "expert 4"} <= {*labels}
    assert not {"expert 0", "cluster 0, real"} & {*labels}
    page = (folder / "report.html").read_text()
    assert '<td class="name">4</td>' in page and '<td class="name">0</td>' not in page
    assert "taken for 0" not in page


def test_a_partitions_page_and_its_warnings_have_numbers() -> None:
    config = made_config(2, numbers=(1, 4))
    info = PartitionInfo(counts_CK=((2, 90),), rows_K=(2, 90), rows_heldout_K=(0, 0), ari=None)
    most, few = size_warnings(config, info)
    assert most.startswith("cluster 4 has 98%") and "again and again: 1" in few
    fit = [ClusterFit(rows=10, far=0), ClusterFit(rows=10, far=9)]
    assert "most of them in cluster 4" in unlike(config, fit)[0]
    page = built(config, *groups(config, [40, 40])).html.decode()
    assert all(f"<td>{number}</td>" in page for number in (1, 4))
