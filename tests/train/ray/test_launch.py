"""Training that a Ray cluster of slices has no room for: refused, or waited for, and said."""

import json

import pytest

from ddm_ray.islands.probe import MARK, NOTE, PREFIX, Note, ProbeReport
from tests.conftest import ddm, end, wait_for
from tests.train.ray.site import Site


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
def test_a_probe_looks_at_the_nodes_that_have_room(site: Site, resource: str) -> None:
    """At those of its slice alone; at all, to say what else is wrong, where none has room."""
    run = site.training("probed", 0, "a").run
    site.cluster.slice("slice-b", 1)
    run.store.write(f"{PREFIX.format('abc')}/{NOTE}", Note().model_dump_json().encode())
    placement = json.dumps({"resources_per_worker": {"CPU": 0.5, resource: 1}})
    names = {**site.cluster.token, "RAY_ADDRESS": site.cluster.address}
    places = [1] if resource == "slice-a" else [0] * sum(node.alive for node in site.cluster.nodes)

    def report() -> ProbeReport:
        done = ddm("islands", "probe", run.url, "--placement", placement, "--question", "abc", **names)
        assert done.returncode == 0, done.stderr
        read = ProbeReport.from_json(done.stdout.splitlines()[-1].removeprefix(MARK))
        assert read and read.trouble is None and read.cluster.open is False
        return read

    # A node that an earlier test has killed is known for some seconds more.
    wait_for(lambda: [node.places for node in report().cluster.nodes] == places, 180)
    read = report()
    assert read.cluster.places == sum(places) and not read.cluster.silent
    assert all(abs(bound) < 10 and node.trouble is None for node in read.cluster.nodes for bound in node.ahead)
    run.store.delete(PREFIX.format("abc"))
