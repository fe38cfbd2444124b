"""Blocks of ports: a free one is nobody else's, and all that an island listens to lies in it."""

import socket
from pathlib import Path

import pytest

from ddm_ray.errors import RayAway
from ddm_ray.islands import ports

BLOCKS = (9100, 9300)


def listening(port: int) -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", port))
    taken.listen()
    return taken


def test_all_ports_of_an_island_lie_in_its_block_and_differ() -> None:
    options = ports.options(12000)
    fixed = [port for name, port in options.items() if not name.endswith("worker-port")]
    workers = range(options["min-worker-port"], options["max-worker-port"] + 1)
    taken = [*fixed, 12000 + ports.HELD, *workers]
    assert sorted(taken) == list(range(12000, 12100))
    assert (options["port"], options["dashboard-port"]) == (12000, 12001)


def test_blocks_leave_alone_what_others_use() -> None:
    low, high = (int(port) for port in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [base for base in ports.BLOCKS if base + ports.SIZE > low and base <= high]
    assert not {*ports.BLOCKS} & {20000 + 100 * number for number in range(100)}
    assert all(other - base >= ports.SIZE for base, other in zip(ports.BLOCKS, ports.BLOCKS[1:], strict=False))


@pytest.mark.parametrize("place", [0, 1, 57, 99])
def test_a_block_with_a_port_in_use_is_passed_over(place: int) -> None:
    with listening(BLOCKS[0] + place), ports.free_block(BLOCKS) as base:
        assert base == BLOCKS[1]
        assert ports.in_use(BLOCKS[0]) == [BLOCKS[0] + place]
    with ports.free_block(BLOCKS) as base:
        assert base == BLOCKS[0]


def test_a_block_is_held_until_its_island_listens() -> None:
    with ports.free_block(BLOCKS) as first, ports.free_block(BLOCKS) as second:
        assert (first, second) == BLOCKS
        assert not ports.in_use(first), "what holds it is nobody's port"
        with pytest.raises(RayAway, match="no 100 ports in a row are free"), ports.free_block(BLOCKS):
            pass


def test_trouble_while_a_block_is_held_is_nobody_elses() -> None:
    with pytest.raises(FileNotFoundError), ports.free_block(BLOCKS):
        raise FileNotFoundError
