"""Who listens on this machine, and what a stranger gets to hear from them: Ray's own services, asked one by one."""

import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import grpc
import ray.core.generated

ROOT = Path(__file__).parent.parent
LISTENING = "0A"
HTTP = (
    ("GET", "/metrics", None),
    ("GET", "/api/version", None),
    ("GET", "/api/v0/nodes", None),
    ("GET", "/api/jobs/", None),
    ("POST", "/api/jobs/", b'{"entrypoint": "true"}'),
    ("POST", "/api/job_agent/jobs/", b'{"entrypoint": "true"}'),
    ("POST", "/get_or_create_runtime_env", b""),
)
WRONG = "0" * 64
"""Nobody's token."""
# What the GCS tells to who has the token.
KNOWN = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


def listeners(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Where these processes listen for TCP: addresses to connect to, and ports."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.add(os.readlink(entry))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in sockets:
                host, _, port = local.partition(":")
                # Its last 4 bytes, in the machine's order: all that matters of an IPv4 address in IPv6 too.
                host = socket.inet_ntoa(bytes.fromhex(host[-8:])[::-1])
                addresses.add(("127.0.0.1" if host == "0.0.0.0" else host, int(port, 16)))
    return addresses


def methods() -> list[str]:
    """All that Ray's processes can be asked over gRPC."""
    names = [f"/ray.rpc.ObjectManagerService/{name}" for name in ("Push", "Pull", "FreeObjects")]
    for module_info in pkgutil.iter_modules(ray.core.generated.__path__):
        if module_info.name.endswith("_pb2"):
            module = importlib.import_module(f"ray.core.generated.{module_info.name}")
            for service in module.DESCRIPTOR.services_by_name.values():
                names += [f"/{service.full_name}/{method.name}" for method in service.methods]
    return names


def ask(address: tuple[str, int], token: str | None = None) -> dict[str, str]:
    """What each question is answered by who listens there, given this token or none.

    Status by verb and path for HTTP, else the code by gRPC method. What isn't known there, or has just ended, is left
    out. With a token other than WRONG, only what alters nothing is asked.
    """
    header = _header(token)
    answers = {}
    for verb, path, body in HTTP:
        connection = HTTPConnection(*address, timeout=60)
        try:
            connection.request(verb, path, body, header)
            answer = connection.getresponse()
        except HTTPException:  # it doesn't speak HTTP/1
            return _ask_grpc(address, header)
        finally:
            connection.close()
        answers[f"{verb} {path}"] = str(answer.status)
    return answers


def _header(token: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def _ask_grpc(address: tuple[str, int], header: dict[str, str]) -> dict[str, str]:
    answers = {}
    with grpc.insecure_channel("{}:{}".format(*address)) as channel:
        for method in [KNOWN] if header not in ({}, _header(WRONG)) else methods():
            try:
                channel.unary_unary(method)(b"", timeout=60, metadata=list(header.items()))
                answers[method] = "OK"
            except grpc.RpcError as error:
                answers[method] = error.code().name
    return {method: code for method, code in answers.items() if code not in ("UNIMPLEMENTED", "UNAVAILABLE")}


def is_refused(answer: str) -> bool:
    """Whether an answer says nothing of Ray's, and does nothing."""
    return answer in ("UNAUTHENTICATED", "401", "403", "405")


def services(answers: dict[str, str]) -> set[str]:
    """The gRPC services that answered."""
    return {question.split("/")[1].rpartition(".")[2] for question in answers if question.startswith("/")}


def asked_by(prefix: Sequence[str], addresses: Iterable[tuple[str, int]], user: int = 0) -> dict[str, str]:
    """`ask` by a process of its own, which the words `prefix` start elsewhere, and which becomes this user first."""
    names = [f"{host}:{port}" for host, port in sorted(addresses)]
    command = [*prefix, sys.executable, "-m", "tests.listeners", str(user), *names]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


if __name__ == "__main__":
    os.setuid(int(sys.argv[1]))
    heard: dict[str, str] = {}
    for name in sys.argv[2:]:
        host, _, port = name.rpartition(":")
        with suppress(OSError):  # it listens to its own machine alone
            heard |= {f"{name} {question}": answer for question, answer in ask((host, int(port))).items()}
    print(json.dumps(heard))
