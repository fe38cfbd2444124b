"""The policies of cluster_configs/s3, enforced before an S3 server by the key that a request is signed with."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qs

from tests.conftest import ROOT
from tests.s3_wire import Fault, Request

FOLDER = ROOT / "cluster_configs/s3"


def policy(role: str, bucket: str, run: str, **places: str) -> dict[str, Any]:
    """A role's policy as the README fills it in: CLUSTER and MODEL by `places`."""
    text = (FOLDER / f"{role}.json").read_text()
    for name, value in {"BUCKET": bucket, "RUN": run, **places}.items():
        text = text.replace(name, value)
    document: dict[str, Any] = json.loads(text)
    return document


class Policies:
    """A wire's rule: each key id may do what its policy allows, and nobody else anything."""

    def __init__(self, policies: Mapping[str, dict[str, Any]]):
        self.policies = dict(policies)

    def rule(self, request: Request) -> Fault | None:
        """DENIED for what isn't allowed; as S3 does it, key by key where several are to be deleted."""
        document = self.policies.get(request.who, {"Statement": []})
        if all(allows(document, action, resource) for action, resource in _asked(request)):
            return None
        return Fault.KEYS_DENIED if request.deletes else Fault.DENIED


def allows(document: Mapping[str, Any], action: str, resource: str) -> bool:
    """True if a statement of the policy allows the action there. These have neither conditions nor denials."""
    for statement in document["Statement"]:
        assert statement.keys() == {"Sid", "Effect", "Action", "Resource"}
        assert statement["Effect"] == "Allow"
        # S3's * stands for slashes, too, as fnmatch's does.
        patterns = [pattern.replace("[", "[[]") for pattern in statement["Resource"]]
        if action in statement["Action"] and any(fnmatchcase(resource, pattern) for pattern in patterns):
            return True
    return False


def _asked(request: Request) -> Iterator[tuple[str, str]]:
    """The actions, as policies call them, that a request comes to, and of which resource."""
    path, _, query = request.path.partition("?")
    bucket, _, key = path.strip("/").partition("/")
    names = parse_qs(query, keep_blank_values=True).keys()
    if request.deletes:
        yield from (("s3:DeleteObject", f"arn:aws:s3:::{bucket}/{each}") for each in request.deletes)
    elif not key:
        yield "s3:ListBucket", f"arn:aws:s3:::{bucket}"
    elif request.method == "DELETE":
        action = "s3:AbortMultipartUpload" if "uploadId" in names else "s3:DeleteObject"
        yield action, f"arn:aws:s3:::{bucket}/{key}"
    else:
        action = "s3:GetObject" if request.method in ("GET", "HEAD") else "s3:PutObject"
        yield action, f"arn:aws:s3:::{bucket}/{key}"


@contextmanager
def signed_by(who: str) -> Iterator[None]:
    """Requests of stores that are opened meanwhile are signed with the key of this id."""
    before, os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_ACCESS_KEY_ID"], who
    try:
        yield
    finally:
        os.environ["AWS_ACCESS_KEY_ID"] = before
