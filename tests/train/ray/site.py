"""Where experts train while things go wrong: a Ray cluster of two slices, and runs that nothing happens to."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load

from ddm_ray.jobs.attempts import SavedState, saved_states
from ddm_ray.run.graph import expert
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.store.store import Store
from ddm_ray.train.state import CURVE
from tests.faults import Training
from tests.random_run import make_data
from tests.train.background import Background
from tests.train.ray.nodes import Nodes, ray_nodes

ISLANDS = """
islands:
  pair: {workers: 2, resources_per_worker: {CPU: 1, slice-a: 1}, checkpoint_steps: 20, hang_seconds: 3}
  elastic: {workers: {min: 1, max: 2}, resources_per_worker: {CPU: 1, slice-a: 1}, checkpoint_steps: 20}
  a: {resources_per_worker: {CPU: 1, slice-a: 1}, checkpoint_steps: 20}
  patient: {resources_per_worker: {CPU: 1, slice-a: 1}, checkpoint_steps: 20, hang_seconds: 600}
  b: {resources_per_worker: {CPU: 1, slice-b: 1}, checkpoint_steps: 20}
  c: {resources_per_worker: {CPU: 1, slice-c: 1}}
  wide: {resources_per_worker: {CPU: 2, slice-a: 1}}
"""
# So many steps that a fault finds them at work; and more than are ever taken.
LONG = ["expert.train.steps=500", "expert.train.batch=6"]
ENDLESS = ["expert.train.steps=10000000", "expert.train.batch=6"]
QUIET = {
    "long": {"settings": LONG, "legs": [{"world": 1}, {"world": 1, "artifact": expert(0)}]},
    "long-2": {"settings": LONG, "legs": [{"world": 2}]},
}


@dataclass
class Site:
    """Where runs are, the Ray cluster that is used now, and the undisturbed runs, which train beside.

    `runs`: a folder, or a prefix in a bucket. `folder`: all else.
    """

    folder: Path
    stack: ExitStack
    runs: str
    clusters: list[Nodes] = field(default_factory=list)
    leaving: list[Training] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "islands.yaml").write_text(ISLANDS)
        (self.folder / "quiet").mkdir()
        self.quiet = self.begin("ranks", str(self.folder / "quiet"), json.dumps(QUIET))

    def begin(self, module: str, *arguments: str) -> Background:
        """Begin something beside, which ends with the site at the latest."""
        process = Background(module, *arguments)
        self.stack.callback(process.kill)
        return process

    @property
    def cluster(self) -> Nodes:
        """The cluster; a new one where its head is lost."""
        if not self.clusters or not self.clusters[-1].nodes[0].alive:
            self.clusters.append(self.stack.enter_context(ray_nodes()))
        return self.clusters[-1]

    def undisturbed(self, name: str) -> Run:
        """A run of the same settings without faults; all experts that a test trains are trained."""
        self.quiet.finish()
        return Run.open(str(self.folder / "quiet" / name))

    def training(self, name: str, index: int, island: str, num_nodes: int = 1, steps: list[str] = LONG) -> Training:
        """An expert of the run of this name, not begun yet, and the nodes of its slice, exactly so many."""
        resource = "slice-b" if island == "b" else "slice-a"
        url = f"{self.runs}/{name}"
        run = Run.open(url) if Store(url).exists(RUN_FILE) else make_data(url, settings=tuple(steps))
        log, nodes = self.folder / f"{name}-expert-{index}.log", self.cluster.slice(resource, num_nodes)
        return Training(run, index, self.cluster, self.folder / "islands.yaml", island, resource, log, nodes)

    def see_off(self) -> None:
        """Wait for what has finished its work to end, and well."""
        while self.leaving:
            self.leaving.pop().wait_for_drivers()


def curve_so_far(run: Run, artifact: str) -> dict[str, torch.Tensor]:
    """Each step's loss and gradient norm up to the newest state; empty before there is one."""
    state = next((state for state in saved_states(run.store, artifact) if isinstance(state, SavedState)), None)
    return load(run.store.read(f"{state.prefix}/{CURVE}")) if state else {"loss": torch.empty(0)}
