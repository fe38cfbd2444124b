"""Training that a Ray cluster of slices has no room for: refused, or waited for, and said."""

import json

import pytest

from ddm_ray.islands.checks import CHECKS
from tests.conftest import ddm, end, wait_for
from tests.train.ray.site import Site

pytestmark = pytest.mark.chaos


def test_a_slice_that_no_node_is_of_is_refused(site: Site) -> None:
    training = site.training("roomless", 0, "a")
    site.cluster.slice("slice-b", 1)
    training.launch("c")
    assert training.drivers[0].wait(120) == 75
    assert training.log_tail().splitlines()[-1] == (
        "error: placement asks for slice-c, which no node of the Ray cluster has (it has slice-a, slice-b);"
        " start nodes that have it (Ray's resources '{\"slice-c\": 1}'), or change resources_per_worker in islands.yaml"
        " (exit code 75: the same command may work later)"
    )


def test_workers_too_wide_for_any_node_are_told_of(site: Site) -> None:
    """The nodes have 2 CPUs together, but none has 2: a larger one is waited for."""
    training = site.training("roomless", 1, "a")
    site.cluster.slice("slice-b", 1)
    training.launch("wide")
    warning = (
        "warning: placement asks for 1 workers of 2 CPU and 1 slice-a, the nodes have room for 0; waiting for nodes."
        " If none will come: Ctrl-C, and change islands.yaml\n"
    )
    wait_for(lambda: warning in training.log_tail(), 120, training.log_tail)
    end(training.drivers[0])


@pytest.mark.parametrize("resource", ["slice-a", "slice-c"])
def test_machines_of_a_cluster_are_checked(site: Site, resource: str) -> None:
    """Those that have room; all, to say what else is wrong, where none has any."""
    run = site.training("checked", 0, "a").run
    site.cluster.slice("slice-b", 1)
    placement = json.dumps({"resources_per_worker": {"CPU": 0.5, resource: 1}})
    names = {**site.cluster.token, "RAY_ADDRESS": site.cluster.address}
    lacks = "wrong: placement asks for slice-c, which no node of the Ray cluster has (it has slice-a, slice-b); start"
    expected = {each.__name__: "sound" for each in CHECKS} | ({"workers": lacks} if resource == "slice-c" else {})

    def agrees() -> bool:
        done = ddm("doctor", run.url, "--placement", placement, **names)
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
        texts[:] = [done.stdout + done.stderr]
        same = [name for name, _ in lines] == [*expected]
        return same and all(text.startswith(expected[name]) for name, text in lines)

    texts: list[str] = []
    # A node that an earlier test has killed is known for some seconds more.
    wait_for(agrees, 180, lambda: texts[0])
