"""What a Kubernetes with KubeRay's operator would refuse, by their schemas. Unknown fields are errors."""

import copy
import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.conftest import ROOT

FOLDER = ROOT / "cluster_configs/kuberay"
KUBERNETES = kubernetes_validate.latest_version()
# What is below these a user names; the other two choose the schema.
FREE = {"labels", "annotations", "matchLabels", "rayStartParams", "requests", "limits"}
CHOOSING = {"apiVersion", "kind"}
Keys = tuple[str | int, ...]


def objects(name: str) -> dict[str, dict[str, Any]]:
    """The objects in a file of cluster_configs/kuberay, by kind."""
    return by_kind((FOLDER / name).read_text())


def by_kind(text: str) -> dict[str, dict[str, Any]]:
    """The objects in the text of such a file."""
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@cache
def _kuberay() -> Draft202012Validator:
    """KubeRay's part of the schema with Kubernetes' own, strict, below it."""
    folder = files("kubernetes_validate") / f"kubernetes-json-schema/v{KUBERNETES}-local-strict"
    definitions = Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    schema = yaml.safe_load((ROOT / "tests/kuberay_schema.yaml").read_text())
    return Draft202012Validator(schema, registry=definitions @ Registry())


def fault(document: dict[str, Any]) -> str:
    """Why a Kubernetes of that version, with KubeRay, would refuse an object; empty if it wouldn't."""
    if document["apiVersion"] == "ray.io/v1":
        error = next(_kuberay().iter_errors(document), None)
        return "" if error is None else f"{error.json_path}: {error.message}"
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


def fields(node: Any, path: Keys = ()) -> Iterator[Keys]:
    """Paths of all fields that a schema names."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if isinstance(key, str) and key not in CHOOSING:
            yield *path, key
        if key not in FREE:
            yield from fields(value, (*path, key))


def at(node: Any, path: Keys) -> Any:
    """What lies at a path."""
    for key in path:
        node = node[key]
    return node


def misspelt(document: dict[str, Any], path: Keys) -> dict[str, Any]:
    """The document with one letter too many in a field's name."""
    document = copy.deepcopy(document)
    parent = at(document, path[:-1])
    parent[f"{path[-1]}s"] = parent.pop(path[-1])
    return document


def overlooked(document: dict[str, Any]) -> list[Keys]:
    """The fields whose misspelling nobody would notice."""
    return [path for path in fields(document) if not fault(misspelt(document, path))]
