"""Fingerprints of networks by content: what a name on a hub or a folder means may change; rows mustn't mix the two."""

import json
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from ddm_ray.errors import DriftError

THREADS = 4


def fingerprint_of(network: nn.Module, about: Any = None) -> str:
    """16 hex digits of the hash over a network's tensors, wherever they are, and what else decides what it gives.

    `about`: plain JSON data.
    """

    def digest(tensor: Tensor) -> str:
        bytes_N = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return sha256(bytes_N.numpy().data).hexdigest()

    tensors = network.state_dict()
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(digest, tensors.values()))
    described = [
        [name, str(tensor.dtype), list(tensor.shape), content]
        for (name, tensor), content in zip(tensors.items(), digests, strict=True)
    ]
    return sha256(json.dumps([sorted(described), about], sort_keys=True).encode()).hexdigest()[:16]


def require_same_network(what: str, fingerprint: str, known: str) -> None:
    """Raise DriftError where a network isn't the one that is `known` to have made a run's rows."""
    if fingerprint != known:
        raise DriftError(
            f"{what}: its fingerprint is {fingerprint}, and this run's rows were made with one of {known}",
            "its files, or the hub's, have changed: bring back those that it had",
        )
