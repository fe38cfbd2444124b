"""Networks that a run has from the hub: whether they can be had, told in seconds. Neither torch nor their libraries."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddm_ray.config import RunConfig
from ddm_ray.errors import DataError
from ddm_ray.spelling import one_line

SECONDS = 5.0
"""Time for which the hub is waited for. Its own library tries again for a minute."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "config.json")


@dataclass(frozen=True)
class HubNetwork:
    """A network that `field` of a configuration names, its repository on the hub, and what does without that."""

    field: str
    repository: str
    fix: str


def require_hub(config: RunConfig) -> None:
    """Raise DataError for a network of the run that no cache of this machine has, where the hub can't be reached."""
    for network in _networks(config):
        if away := out_of_reach(network.repository):
            raise DataError(f"{network.field}: {away}", network.fix)


def out_of_reach(name: str) -> str | None:
    """Words on a network that this machine can't have, neither from a folder, nor from its cache, nor from the hub.

    None where it can, or where only its own library tells.
    """
    if network_folder(name) is not None:
        return None
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.errors import HTTPError

    if not _names_a_repository(name):
        return f"{name} is no folder of this machine"
    try:
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        # Any answer will do: what it means is for the network's own library to say.
        get_session().head(hf_hub_url(name, WEIGHTS[0]), timeout=SECONDS)
    except (OSError, HTTPError) as error:
        away = f"{constants.ENDPOINT} can't be reached ({one_line(error, 100)})"
        return f"{name} isn't in this machine's cache, and {away}"
    return None


def encoders_in_training(config: RunConfig) -> list[str]:
    """Names of the networks, in the hub or a folder, that each worker of a training of this run loads beside its own.

    These are its text encoders, where rows keep ids of tokens.
    """
    text = config.data.text
    if text is None or text.stored == "features":
        return []
    return [text.encoder, *([text.pooled_encoder] if text.pooled_encoder else [])]


def _networks(config: RunConfig) -> Iterator[HubNetwork]:
    """Networks that rows are made with, where these are no files."""
    embedder, data = config.embedder, config.data
    fix = "begin a run with embedder.checkpoint set to a file of its weights, or with embedder.kind pixels"
    if embedder.kind == "timm" and not (config.partition.given or embedder.checkpoint):
        _, of_hub, repository = embedder.model.partition("hf-hub:")  # timm's own spelling of another one's repository
        if of_hub or ":" not in embedder.model:  # others are timm's own words for a folder
            yield HubNetwork("embedder", repository if of_hub else f"timm/{embedder.model}", fix)
    named = {}
    if embedder.kind == "transformers" and not config.partition.given:
        named["embedder.model"] = embedder.model
    if data.text is not None:
        named |= {"data.text.encoder": data.text.encoder, "data.text.pooled_encoder": data.text.pooled_encoder or ""}
    if data.latents is not None:
        named["data.latents.autoencoder"] = data.latents.autoencoder
    for field, name in named.items():
        if name:
            yield HubNetwork(field, name, f"begin a run with {field} set to a folder that has it")


def network_folder(name: str) -> Path | None:
    """The folder that a network's name is, or in which this machine's cache has it; None if there is none."""
    if os.path.isdir(name):  # False, too, in a folder without permission
        return Path(name)
    if not _names_a_repository(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    files = (try_to_load_from_cache(name, file) for file in WEIGHTS)
    return next((Path(file).parent for file in files if isinstance(file, str)), None)


def _names_a_repository(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
