"""Who listens on this machine, and what a stranger gets to hear from them: Ray's own services, asked one by one."""

import importlib
import os
import pkgutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import grpc
import ray.core.generated

LISTENING = "0A"
HTTP = (
    ("GET", "/api/version", None),
    ("GET", "/api/v0/nodes", None),
    ("GET", "/api/jobs/", None),
    ("POST", "/api/jobs/", b'{"entrypoint": "true"}'),
    ("POST", "/api/job_agent/jobs/", b'{"entrypoint": "true"}'),
    ("POST", "/get_or_create_runtime_env", b""),
)
# What the GCS tells to who has the token.
KNOWN = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
# Counters for Prometheus are everybody's to read.
COUNTERS = "text/plain; version="


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
    out.
    """
    header = {"authorization": f"Bearer {token}"} if token else {}
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
        counters = answer.getheader("Content-Type", "").startswith(COUNTERS)
        answers[f"{verb} {path}"] = "counters" if counters else str(answer.status)
    return answers


def _ask_grpc(address: tuple[str, int], header: dict[str, str]) -> dict[str, str]:
    answers = {}
    with grpc.insecure_channel("{}:{}".format(*address)) as channel:
        # With a token, only what alters nothing.
        for method in [KNOWN] if header else methods():
            try:
                channel.unary_unary(method)(b"", timeout=60, metadata=list(header.items()))
                answers[method] = "OK"
            except grpc.RpcError as error:
                answers[method] = error.code().name
    return {method: code for method, code in answers.items() if code not in ("UNIMPLEMENTED", "UNAVAILABLE")}


def is_refused(answer: str) -> bool:
    """Whether an answer says nothing of Ray's, and does nothing."""
    return answer in ("UNAUTHENTICATED", "401", "405", "counters")


def services(answers: dict[str, str]) -> set[str]:
    """The gRPC services that answered."""
    return {question.split("/")[1].rpartition(".")[2] for question in answers if question.startswith("/")}
