"""Models and tokenizers of other libraries, read whole from their own files or refused in one line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ddm_ray.errors import ConfigError, CorruptArtifact, TruncatedWeights, one_line

CONFIG = "config.json"


def load_model(
    kind: Any, name: str, what: str, ignored: Sequence[str] = (), arguments: Mapping[str, Any] | None = None
) -> Any:
    """`kind.from_pretrained(name, **arguments)`: from a folder, of safetensors and without network, or the hub.

    These libraries draw at random what a file lacks, so CorruptArtifact names a tensor that is missing, of another
    shape, or unknown (but for beginnings in `ignored`). TruncatedWeights; ConfigError if `name` holds no model.
    """
    # Sizes are compared here, since the libraries' own errors don't say which tensor it is.
    settings: dict[str, Any] = {**(arguments or {}), "output_loading_info": True, "ignore_mismatched_sizes": True}
    require_config(name, what)
    if Path(name).is_dir():
        _require_whole(Path(name))
        settings["use_safetensors"] = True
    model, report = load(kind, name, what, **settings)
    unknown = [key for key in report["unexpected_keys"] if not key.startswith(tuple(ignored))]
    for problem, keys in (
        ("lacks the tensor", report["missing_keys"]),
        ("has another shape than its config says: tensor", [key for key, *_ in report["mismatched_keys"]]),
        (f"is no {kind.__name__} alone: has the tensor", unknown),
    ):
        if keys:
            raise CorruptArtifact(f"{what} {name}: {problem} {min(keys)}; fetch it again")
    return model


def load(kind: Any, name: str, what: str, **settings: Any) -> Any:
    """`kind.from_pretrained(name, **settings)`. CorruptArtifact for a folder, ConfigError for another name."""
    local = Path(name).is_dir()
    try:
        return kind.from_pretrained(name, **(settings | {"local_files_only": True} if local else settings))
    except Exception as error:  # a border: nobody promises what these libraries raise for files that are unfit
        if local:
            raise CorruptArtifact(f"{what} {name}: can't be loaded ({brief(error)}); fetch it again") from error
        raise ConfigError(f"{what} {name}: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """An error's kind and message as one line of at most 200 characters."""
    return one_line(f"{type(error).__name__}: {error}", 200)


def require_config(name: str, what: str) -> None:
    """CorruptArtifact unless a folder's config is a JSON object, ConfigError if it has none. Names of the hub pass."""
    folder = Path(name)
    config = folder / CONFIG
    if not folder.is_dir():
        return
    if not config.is_file():
        raise ConfigError(f"{what} {folder}: has no {CONFIG}; name a folder that save_pretrained wrote")
    try:
        fields = json.loads(config.read_bytes())
    except ValueError:
        raise CorruptArtifact(f"{config}: not JSON; fetch it again") from None
    if not isinstance(fields, dict):
        raise CorruptArtifact(f"{config}: not an object; fetch it again")


def _require_whole(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise TruncatedWeights(f"{file}: not whole safetensors ({brief(error)}); fetch it again") from None
