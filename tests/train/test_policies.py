"""Least privilege in a bucket: every stage passes under its role, and every foreign write is refused."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import obstore
import obstore.store
import pytest
from obstore.exceptions import BaseError

from ddm_ray.config import load_recipe
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.evaluate.run import evaluate
from ddm_ray.islands.checks import Machine, check
from ddm_ray.jobs.status import survey
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import MONOLITH, PARTITION, ROUTER, STUDENT, Artifact
from ddm_ray.run.run import Run
from ddm_ray.sampling.acceptance import accept_made
from ddm_ray.sampling.run_models import load_models
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.cluster.servable import require_servable, sound_version
from ddm_ray.store.retries import NO_RETRIES, Trouble
from tests.conftest import ROOT
from tests.data.s3 import BUCKET, s3_server
from tests.derived import derive
from tests.s3_wire import Wire, leading_through
from tests.serve.conftest import free_port
from tests.train.policies import FOLDER, Policies, policy, signed_by

pytestmark = pytest.mark.chaos

URL = f"s3://{BUCKET}/lab/run"
SHORT = tuple(f"{job}.train.steps=8" for job in ("expert", "router"))
ISLANDS = {f"island{cluster}": f"experts/00{cluster}" for cluster in range(2)}
ROLES = {
    "coordinator": ("coordinator", {}),
    "reader": ("reader", {}),
    "worker": ("worker", {}),
    **{name: ("island", {"CLUSTER": path[-3:]}) for name, path in ISLANDS.items()},
    **{kind: ("model", {"MODEL": kind}) for kind in (ROUTER, MONOLITH, STUDENT)},
}
PREFIXES = {
    "coordinator": (
        "_probe-",
        "beginnings/",
        "derived/",
        "rows/",
        "partition/",
        "accepted/",
        "eval/",
        "references/",
    ),
    "reader": (),
    **{name: (f"{path}/", f"replay/cluster={path[-3:]}/") for name, path in ISLANDS.items()},
    **{kind: (f"{kind}/",) for kind in (ROUTER, MONOLITH, STUDENT)},
}
PREFIXES["worker"] = (
    "islands/north/",
    "_probe-",
    *(key for who in (*ISLANDS, ROUTER, MONOLITH, STUDENT) for key in PREFIXES[who]),
)
"""Keys, by their beginnings, that a role writes."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A wire before a bucket, which heeds the policies; whom it knows has a key of its role's name."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server, leading_through(server) as wire:
        documents = {who: policy(role, BUCKET, "lab/run", **places) for who, (role, places) in ROLES.items()}
        wire.rule = Policies(documents).rule
        yield wire


@pytest.fixture(scope="module")
def trained(bucket: Wire) -> Run:
    """A run whose every stage was made under its role; expert and router are forked, as on machines of their own."""
    with signed_by("coordinator"):
        run = Run.create(URL, load_recipe("tiny", ("acceptance=by_hand", "evaluate.num_samples=16", *SHORT)))
        prepare(run, execute=serial)
        partition(run)
    experts = [(name, Artifact(path)) for name, path in ISLANDS.items()]
    train([*experts, (str(ROUTER), ROUTER), ("worker", MONOLITH)])
    with signed_by("coordinator"):
        run = Run.open(URL)
        for artifact in (*run.experts, ROUTER, MONOLITH):
            accept_made(run, artifact)
    train([(str(STUDENT), STUDENT)])
    with signed_by("coordinator"):
        accept_made(run, STUDENT)
        evaluate(run, "default")
    return run


def train(jobs: list[tuple[str, Artifact]], placement: TrainPlacement | None = None, url: str = URL) -> None:
    """Train artifacts, each signed with the key of a name, in processes of their own."""
    tasks = [
        {
            "url": url,
            "artifact": job,
            "retry_policy": asdict(NO_RETRIES),
            "environment": {"AWS_ACCESS_KEY_ID": who},
            "placement": (placement or TrainPlacement()).model_dump(mode="json"),
        }
        for who, job in jobs
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.s3_faults"],
        input="".join(f"{json.dumps(task)}\n" for task in tasks),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.split() == ["0"] * len(jobs), done.stderr[-3000:]


@pytest.mark.chaos
def test_every_stage_passes_under_its_role(bucket: Wire, trained: Run) -> None:
    with signed_by("reader"):
        run = Run.open(URL)
        assert {each.artifact: each.state for each in survey(run) if each.state != "finished"} == {}
        models = load_models(run)
        sound_version(require_servable(ServeArgs(run=URL), free_port()))
    assert models.info.num_experts == 2
    assert [f"{each.who}: {each.method} {each.path}" for each in bucket.requests if each.fault] == []


@pytest.mark.chaos
def test_an_island_that_works_is_checked_by_its_own_key(bucket: Wire, trained: Run) -> None:
    with signed_by("worker"):
        assert {*check(Machine(URL, TrainPlacement())).values()} == {""}


@pytest.mark.parametrize("who", ROLES)
def test_every_foreign_write_is_refused(bucket: Wire, trained: Run, who: str) -> None:
    keys = [*sorted({key for each in PREFIXES.values() for key in each}), "anything"]
    with signed_by(who):
        store = obstore.store.from_url(URL, retry_config={"max_retries": 0})

    def denied(write: Callable[[], object]) -> bool:
        try:
            write()
        except BaseError as error:
            return Trouble.of(error) is Trouble.DENIED
        return False

    for key in keys:
        foreign = key not in PREFIXES[who]
        name = f"{key}_MANIFEST.json" if foreign and key.endswith("/") else f"{key}.note"
        assert denied(partial(obstore.put, store, name, b"x")) == foreign, name
        assert denied(partial(obstore.delete, store, name)) == foreign, name
    with signed_by("reader"):
        assert Run.open(URL).require(PARTITION).digest == trained.require(PARTITION).digest


def test_an_island_reads_no_other_clusters_rows(bucket: Wire, trained: Run) -> None:
    with signed_by("island0"):
        store = obstore.store.from_url(URL, retry_config={"max_retries": 0})
        names = [entry["path"] for entry in obstore.list(store).collect()]
    rows = [name for name in names if re.match(r"rows/|partition/shards/", name) and name.endswith(".parquet")]

    def readable(name: str) -> bool:
        try:
            obstore.get(store, name)
        except BaseError:
            return False
        return True

    own = {name for name in rows if "cluster=000" in name}
    assert own
    assert {name for name in rows if readable(name)} == own


@pytest.mark.chaos
def test_a_derived_run_is_begun_and_trained_under_the_policies(bucket: Wire, trained: Run) -> None:
    """Who trains it has the policy for the base, and the same one for the derived run."""
    places = ("lab/run", "lab/longer")
    both = {
        who: {"Statement": [each for place in places for each in policy(who, BUCKET, place)["Statement"]]}
        for who in ("worker", "coordinator")
    }
    rule, bucket.rule = bucket.rule, Policies(both).rule
    try:
        with signed_by("coordinator"):
            run = derive(Run.open(URL), "expert.train.steps=12", url=f"s3://{BUCKET}/lab/longer")
            assert run.require(ROUTER).digest == trained.require(ROUTER).digest
        train([("worker", run.experts[0])], url=run.url)
        with signed_by("coordinator"):
            assert accept_made(run, run.experts[0]).info["step"] == 12
            own = Run.open(URL).require(run.experts[0])
    finally:
        bucket.rule = rule
    assert own.info["step"] == 8 and own.digest == trained.require(run.experts[0]).digest


def test_the_policies_are_complete_and_the_readme_names_them() -> None:
    text = (FOLDER.parent / "README.md").read_text()
    for file in FOLDER.glob("*.json"):
        assert f"{file.stem}.json" in text
        filled_in = policy(file.stem, "lab", "run7", CLUSTER="003", MODEL="router")
        assert not {*re.findall(r"[A-Z]{4,}", json.dumps(filled_in))} - {"STOP", "DRAIN", "MANIFEST"}
