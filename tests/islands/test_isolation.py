"""Three Ray clusters that can reach each other and never do: a whole run of `digits`, with each frame counted."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddm_ray.jobs.attempts import Attempt, claimed
from ddm_ray.run.run import Run
from tests.conftest import BIN, ROOT, ddm, wait_for
from tests.data.s3 import BUCKET, s3_server
from tests.islands.network import ARP, IPV4, STORAGE, Machine, Traffic, network
from tests.s3_wire import leading_through
from tests.train.results import checksums_of

pytestmark = pytest.mark.contract

NAMES = ("north", "south", "west")
# As services do it: a head that is lost, or was too slow to start for Ray, and what ends with 75, are started again.
ISLAND = """
set -u
export HOME=$(mktemp -d /tmp/island.XXXXXX) RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH=$HOME/.ddm/island-0/token
(while true; do cluster_configs/local/island.sh 0 1; sleep 1; done) > $HOME/ray.log 2>&1 &
until [ -e $RAY_AUTH_TOKEN_PATH ]; do sleep 0.1; done
while true; do
  ddm work "$1" --island "$2" --address 127.0.0.1:20000
  code=$?
  [ $code = 75 ] || exit $code
  sleep 1
done
"""


def test_what_passes_between_two_machines_is_counted() -> None:
    with network(["north", "south"]) as net:
        north, south = (net.machines[name] for name in ("north", "south"))
        send = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(100), (sys.argv[1], 9))"

        def tell(source: Machine, address: str) -> None:
            subprocess.run(source.command(sys.executable, "-c", send, address), check=True, timeout=60)

        tell(north, net.storage)
        wait_for(
            lambda: {"north"} == {each.source for each in net.meter.bytes if each.kind != ARP},
            30,
            lambda: str(net.meter.bytes),
        )
        assert not net.meter.between(["north", "south"])
        tell(north, south.address)
        # The other one's kernel answers that nobody listens.
        wait_for(lambda: len(net.meter.between(["north", "south"])) == 2, 30, lambda: str(net.meter.bytes))
        assert net.meter.between(["north", "south"])[Traffic("north", "south", IPV4)] == 14 + 20 + 8 + 100


@pytest.mark.chaos
def test_a_run_by_three_islands_that_reach_storage_alone(tmp_path: Path) -> None:
    url, alone = f"s3://{BUCKET}/three", str(tmp_path / "alone")
    with ExitStack() as stack:
        net = stack.enter_context(network(NAMES))
        server = stack.enter_context(s3_server(tmp_path / "s3.log"))
        wire = stack.enter_context(leading_through(server, net.storage))
        for words in (("init", url, "--recipe", "digits"), ("prepare", url), ("partition", url)):
            done = ddm(*words, timeout=600)
            assert done.returncode == 0, done.stderr[-3000:]
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        logs = {name: tmp_path / f"{name}.log" for name in NAMES}
        islands = {}
        for name, machine in net.machines.items():
            sink = stack.enter_context(logs[name].open("wb"))
            command = machine.command("bash", "-c", ISLAND, "island", url, name)
            islands[name] = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=ROOT, env=environment)
            stack.callback(islands[name].wait)
            stack.callback(islands[name].kill)
        for name, island in islands.items():
            assert island.wait(1800) == 0, logs[name].read_text()[-3000:]
        net.meter.finish()
        assert net.meter.between(NAMES) == {}
        run = Run.open(url)
        owners = {artifact: Attempt(run.store, artifact, 1).claim()["island"] for artifact in run.experts}
        assert len({*owners.values()}) > 1, owners
        assert all(claimed(run.store, artifact) == [1] for artifact in run.experts)
        sent = {
            name: sum(n for t, n in net.meter.bytes.items() if (t.source, t.target) == (name, STORAGE))
            for name in NAMES
        }
        print(
            json.dumps({"owners": owners, "bytes to storage": sent, "bytes between": 0, "requests": len(wire.requests)})
        )
        assert all(sent.values())

        for words in (("init", alone, "--recipe", "digits"), ("prepare", alone), ("partition", alone)):
            assert ddm(*words, timeout=600).returncode == 0
        for number in range(len(run.experts)):
            done = ddm("train", alone, "expert", str(number), timeout=900)
            assert done.returncode == 0, done.stderr[-3000:]
        assert checksums_of(run, run.experts) == checksums_of(Run.open(alone), run.experts)
