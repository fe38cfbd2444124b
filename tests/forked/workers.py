"""The process that a node's workers are forked from: it imports what all of them import, and waits to be asked.

They are processes of their own as ever, of the raylet's descent; only seconds of imports are done once for all.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# Not Ray itself: its part in C++ keeps the number of the job that it saw first.
PRELOADED = "asyncio torch pyarrow.dataset pyarrow.parquet fsspec pydantic requests jsonschema grpc yaml"
# What glibc reads in the environment of a process that begins, as mallopt's numbers.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_MAX_": -4, "MALLOC_ARENA_MAX": -8}


def request_of_a_fork(listening: socket.socket) -> dict[str, Any]:
    """Returns in each fork, with the command that it is to run; the process itself ends with its parent."""
    parent, forks = os.getppid(), dict[socket.socket, int]()
    while os.getppid() == parent != 1:  # whose parent ended before this line has init's number
        for ready in select.select([listening, *forks], [], [], 0.5)[0]:
            if ready is not listening:
                signalled = ready.recv(1)
                with suppress(ProcessLookupError):
                    os.kill(forks[ready], signal.SIGTERM if signalled else signal.SIGKILL)
                if not signalled:
                    _bury(ready, forks)
                continue
            asking, _ = listening.accept()
            head, files, _, _ = socket.recv_fds(asking, 4, 3)
            text = asking.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
            child = os.fork()
            if not child:
                for number, file in enumerate(files):
                    os.dup2(file, number)
                for other in (listening, asking, *forks):
                    other.close()
            for file in files:
                os.close(file)
            if not child:
                request: dict[str, Any] = json.loads(text)
                return request
            forks[asking] = child
        for asking, child in list(forks.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del forks[asking]
                asking.close()
    os._exit(0)


def _bury(asking: socket.socket, forks: dict[socket.socket, int]) -> None:
    os.waitpid(forks.pop(asking), 0)
    asking.close()


def run(request: dict[str, Any]) -> None:
    """Do what `setup_worker.py` and the worker that it starts would do."""
    os.setpgrp()  # as a raylet's child has a group of its own
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers import setup_worker

    script, *arguments = request["arguments"]
    if script == setup_worker.__file__:
        options, (script, *arguments) = setup_worker.parser.parse_known_args(arguments)
        context = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}")
        assert not context.command_prefix
        assert context.py_executable == sys.executable
        update_envs(context.env_vars)
    for name, number in MALLOC.items():
        if name in os.environ:
            ctypes.CDLL(None).mallopt(number, min(int(os.environ[name]), 2**31 - 1))
    own, paths = str(Path(__file__).parent), [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    sys.path[:] = [str(Path(script).parent), *paths, *(path for path in sys.path if path not in (*paths, own))]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    gc.disable()
    for module in (PRELOADED + " " + os.environ.get("DDM_TESTS_PRELOAD", "")).split():
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    run(request_of_a_fork(socket.socket(fileno=int(sys.argv[1]))))
