"""Training that a Ray cluster of slices has no room for: refused, or waited for, and said."""

from tests.conftest import end, wait_for
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
