"""From the process that a raylet starts for a worker, to a fork that is the worker.

The former stays, and passes on what the raylet does to it: SIGTERM, and by its end SIGKILL. It ends with the fork.
"""

import json
import os
import signal
import socket
import sys

TERM = b"T"


def begin() -> None:
    """Start what is forked as a child of this process, which is one of a raylet's."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(_name())
    listening.listen(64)
    listening.set_inheritable(True)
    if not os.fork():
        workers = os.path.join(os.path.dirname(__file__), "workers.py")
        os.execv(sys.executable, [sys.executable, workers, str(listening.fileno())])
    listening.close()


def to_fork(arguments: list[str]) -> None:
    """Let a fork do what this process was started for; returns where it has to do it itself."""
    if not any(argument.endswith("/default_worker.py") for argument in arguments):
        return
    begins = "--serialized-runtime-env-context="
    context = next((argument.removeprefix(begins) for argument in arguments if argument.startswith(begins)), "{}")
    if json.loads(context).get("command_prefix"):
        return  # a worker that begins in a folder of its own
    asking = socket.socket(socket.AF_UNIX)
    try:
        asking.connect(_name())
    except ConnectionRefusedError:
        return
    request = {"arguments": arguments, "environ": dict(os.environ), "folder": os.getcwd()}
    signal.signal(signal.SIGTERM, lambda *_: asking.send(TERM))
    text = json.dumps(request).encode()
    socket.send_fds(asking, [len(text).to_bytes(4, "big")], [0, 1, 2])
    asking.sendall(text)
    asking.recv(1)  # until the fork has ended
    os._exit(0)


def _name() -> str:
    """An address that is this node's: its raylet's number, and when that began."""
    raylet = os.getppid()
    with open(f"/proc/{raylet}/stat") as file:
        return f"\0ddm-workers-{raylet}-{file.read().rpartition(')')[2].split()[19]}"
