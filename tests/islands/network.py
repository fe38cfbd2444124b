"""Machines as network namespaces on one switch, whose frames are counted: who sent how many bytes to whom."""

import errno
import shutil
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

import pytest

from tests.conftest import BIN, ROOT

STORAGE, EVERYONE = "storage", "everyone"
IPV4, ARP, EVERY_KIND = 0x0800, 0x0806, 0x0003
OUTGOING = 4  # <linux/if_packet.h>: a frame on its way out of an interface
PACKET_LEVEL, STATISTICS = 263, 6
BUFFER_FORCE = 33  # SO_RCVBUFFORCE of <asm-generic/socket.h>
HEADER = struct.Struct("!6s6sH")


@dataclass(frozen=True)
class Traffic:
    """Frames from one machine to another; `kind` is their EtherType."""

    source: str
    target: str
    kind: int


class Meter:
    """Counts the bytes of each frame where it enters the switch."""

    def __init__(self, ports: dict[str, str]):
        """`ports`: interface of the switch by the machine behind it."""
        self.bytes: Counter[Traffic] = Counter()
        self._machines: dict[bytes, str] = {}
        self._sockets = {name: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) for name in ports}
        for name, raw in self._sockets.items():
            raw.setsockopt(socket.SOL_SOCKET, BUFFER_FORCE, 64 << 20)
            raw.bind((ports[name], EVERY_KIND))  # before, it hears nothing: with a protocol, all interfaces
            raw.settimeout(0.2)
        self._threads = [threading.Thread(target=self._count, args=(name,), daemon=True) for name in ports]
        self._ended, self._failed = False, list[OSError]()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()
        for raw in self._sockets.values():
            raw.close()

    def know(self, address: str, machine: str) -> None:
        """Name the machine that has a MAC address."""
        self._machines[bytes.fromhex(address.replace(":", ""))] = machine

    def between(self, machines: Sequence[str]) -> dict[Traffic, int]:
        """What passed between these machines, or went from one to everyone, but for questions of who has an address."""
        return {
            traffic: number
            for traffic, number in self.bytes.items()
            if traffic.source in machines and traffic.target != STORAGE and traffic.kind != ARP
        }

    def finish(self) -> None:
        """Count what has come so far, and no more. Raises OSError where frames weren't all counted."""
        self._ended = True
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise self._failed[0]
        if lost := self._lost():
            raise OSError(f"{lost} frames came too fast to be counted")

    def _lost(self) -> int:
        return sum(
            struct.unpack("II", each.getsockopt(PACKET_LEVEL, STATISTICS, 8))[1] for each in self._sockets.values()
        )

    def _count(self, machine: str) -> None:
        header, raw = bytearray(HEADER.size), self._sockets[machine]
        while True:
            try:
                size, where = raw.recvfrom_into(header, 0, socket.MSG_TRUNC)
            except TimeoutError:
                if self._ended:
                    return  # all that came is counted
                continue
            except OSError as error:
                if error.errno != errno.ENETDOWN:  # cut off for a while
                    self._failed.append(error)
                    return
                continue
            if where[2] != OUTGOING:
                target, _, kind = HEADER.unpack(header)
                # The lowest bit of the first byte: to many.
                known = EVERYONE if target[0] & 1 else self._machines.get(target, STORAGE)
                self.bytes[Traffic(machine, known, kind)] += size


@dataclass(frozen=True)
class Machine:
    """A network namespace with one interface, on the switch, whose end of that link is `port`."""

    name: str
    namespace: str
    address: str
    port: str

    def command(self, *words: str) -> list[str]:
        """The command that runs there, with shared memory and processes of its own, all of which end with it.

        It has a /tmp of its own too, unless what it runs lies in that.
        """
        own = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        if not any(path.is_relative_to("/tmp") for path in (ROOT, BIN)):
            own = f"mount -t tmpfs tmpfs /tmp && {own}"
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", own, "sh"]
        return ["ip", "netns", "exec", self.namespace, *unshare, *words]


@dataclass(frozen=True)
class Network:
    """Machines on a switch, at which this process has the address `storage`."""

    machines: dict[str, Machine]
    storage: str
    meter: Meter


def lacks() -> str:
    """What a network of namespaces needs and this machine hasn't; empty: all is here."""
    missing = [name for name in ("ip", "unshare") if not shutil.which(name)]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2, util-linux)"
    for number in count():
        done = _ip("netns", "add", f"ddm-try-{number}", check=False)
        if done.returncode == 0:
            _ip("netns", "del", f"ddm-try-{number}")
            return ""
        if "exists" not in done.stderr or number > 100:
            return f"needs root: {done.stderr.strip():.100}"
    raise AssertionError


@contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """One switch, and a machine of each name on it; skips the test where the machine can't have it."""
    if lack := lacks():
        pytest.skip(lack)
    with ExitStack() as stack:
        number = next(each for each in range(100, 250) if _free(f"ddmbr{each}"))
        switch, subnet = f"ddmbr{number}", f"10.77.{number}"
        _ip("link", "add", switch, "type", "bridge")
        stack.callback(_ip, "link", "del", switch)
        _ip("addr", "add", f"{subnet}.1/24", "dev", switch)
        _ip("link", "set", switch, "up")
        machines, ports = {}, {}
        for place, name in enumerate(names):
            ports[name] = port = f"ddm{number}v{place}"
            machine = Machine(name, f"ddm-{number}-{place}", f"{subnet}.{10 + place}", port)
            _ip("netns", "add", machine.namespace)
            stack.callback(_ip, "netns", "del", machine.namespace)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
            # It would go with the namespace, but later than the next network of this name may want it.
            stack.callback(_ip, "link", "del", port)
            _ip("link", "set", port, "master", switch)
            _ip("link", "set", port, "up")
            # Else each new interface speaks to all by itself.
            silence = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"
            _ip("netns", "exec", machine.namespace, "sh", "-c", silence)
            _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", machine.namespace, "link", "set", interface, "up")
            machines[name] = machine
        with Meter(ports) as meter:
            for machine in machines.values():
                reading = _ip("netns", "exec", machine.namespace, "cat", "/sys/class/net/eth0/address")
                meter.know(reading.stdout.strip(), machine.name)
            yield Network(machines, f"{subnet}.1", meter)


def _free(switch: str) -> bool:
    return not Path(f"/sys/class/net/{switch}").exists()


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)
