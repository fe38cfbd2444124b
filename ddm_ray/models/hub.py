"""Networks that a run has from the hub: whether they can be had, told in seconds. Neither torch nor their libraries."""

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
    networks = [network for network in _networks(config) if not _cached(network.repository)]
    if not networks:
        return
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.errors import HTTPError

    network = networks[0]
    try:
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        # Any answer will do: what it means is for the network's own library to say.
        get_session().head(hf_hub_url(network.repository, WEIGHTS[0]), timeout=SECONDS)
    except (OSError, HTTPError) as error:
        lacking = f"isn't in this machine's cache, and {constants.ENDPOINT} can't be reached ({one_line(error, 100)})"
        raise DataError(f"{network.field}: {network.repository} {lacking}", network.fix) from None


def _networks(config: RunConfig) -> Iterator[HubNetwork]:
    """Networks that rows are made with, where these are neither folders nor files."""
    embedder, data = config.embedder, config.data
    fix = "begin a run with embedder.checkpoint set to a file of its weights, or with embedder.kind pixels"
    if embedder.kind == "timm" and not (config.partition.given or embedder.checkpoint):
        yield HubNetwork("embedder", f"timm/{embedder.model}", fix)
    named = {}
    if embedder.kind == "transformers" and not config.partition.given:
        named["embedder.model"] = embedder.model
    if data.text is not None:
        named |= {"data.text.encoder": data.text.encoder, "data.text.pooled_encoder": data.text.pooled_encoder or ""}
    if data.latents is not None:
        named["data.latents.autoencoder"] = data.latents.autoencoder
    for field, name in named.items():
        if name and not Path(name).is_dir():
            yield HubNetwork(field, name, f"begin a run with {field} set to a folder that has it")


def _cached(repository: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(repository, file), str) for file in WEIGHTS)
    except HFValidationError:
        return True  # no name of the hub: its library says so
