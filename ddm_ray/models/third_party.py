"""Models and tokenizers of other libraries, read whole from their own files or refused in one line.

No code that comes with such files is run: classes are those that are named here or by the caller, weights are
safetensors, and a folder by which code would be run or fetched is refused before a library sees it.
"""

import json
import math
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ddm_ray.errors import ConfigError, CorruptArtifact
from ddm_ray.models.foreign_weights import what_else
from ddm_ray.parsing import parse_object
from ddm_ray.spelling import printable

CONFIG = "config.json"
TOKENIZERS = frozenset(
    {"CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast"}
    | {"PreTrainedTokenizerFast", "TokenizersBackend"}  # of any model: a tokenizer.json is all that they read
)
PROCESSORS = frozenset(
    f"{name}{end}"
    for name in ("BitImage", "CLIPImage", "ConvNextImage", "DINOv3ViTImage", "SiglipImage", "ViTImage")
    for end in ("Processor", "ProcessorFast", "ProcessorPil")
) | {"CLIPFeatureExtractor", "ViTFeatureExtractor"}
NAMED = {
    **dict.fromkeys(["AutoTokenizer", *TOKENIZERS], ("tokenizer_config.json", "tokenizer_class", TOKENIZERS)),
    "AutoImageProcessor": ("preprocessor_config.json", "image_processor_type", PROCESSORS),
    "AutoencoderKL": (CONFIG, "_class_name", frozenset({"AutoencoderKL"})),
}
"""By what is loaded: the file and field that name a class, and the classes that may be named."""
CODE = frozenset(
    {"auto_map", "custom_pipelines", "trust_remote_code", "quantization_config", "kernel_config"}
    | {"attn_implementation", "_attn_implementation", "experts_implementation"}
)
"""Fields by which these libraries run or fetch code, or kernels."""
VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "merges.txt", "spiece.model"})
READ = frozenset({CONFIG, *(file for file, _, _ in NAMED.values())})
"""Files of JSON that hold an object."""
ADAPTER = "adapter_config.json"
MAX_DRAWN = 1 << 27
"""Numbers that are drawn at random where files lack them, to tell which are lacking."""
MAX_BYTES, MAX_TEXT, MAX_LAYERS = 1 << 24, 1 << 26, 1000
"""Of JSON, of a vocabulary; layers of a model, and items of a list in its config."""


def load_pretrained_model(
    kind: Any, name: str, what: str, ignored: Sequence[str] = (), arguments: Mapping[str, Any] | None = None
) -> Any:
    """`kind.from_pretrained(name, **arguments)`: from a folder, without network, or the hub; of safetensors alone.

    These libraries draw at random what a file lacks, so CorruptArtifact names a tensor that is missing, of another
    shape, or unknown (but for beginnings in `ignored`). CorruptArtifact; ConfigError if `name` holds no model.
    """
    require_config(name, what)
    if Path(name).is_dir():
        _require_modest(kind, name, what, _numbers_of(Path(name)))
    # Sizes are compared here, since the libraries' own errors don't say which tensor it is.
    settings = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    model, report = load_pretrained(kind, name, what, **{**(arguments or {}), **settings})
    unknown = [key for key in report["unexpected_keys"] if not key.startswith(tuple(ignored))]
    for problem, keys in (
        ("lacks the tensor", report["missing_keys"]),
        ("has another shape than its config says: tensor", [key for key, *_ in report["mismatched_keys"]]),
        (f"is no {kind.__name__} alone: has the tensor", unknown),
    ):
        if keys:
            raise CorruptArtifact(f"{what} {name}: {problem} {min(keys)}; fetch it again")
    return model


def load_pretrained(kind: Any, name: str, what: str, **settings: Any) -> Any:
    """`kind.from_pretrained(name, **settings)`. CorruptArtifact for a folder, ConfigError for another name.

    The latter passes where it is the way to the hub that failed.
    """
    local = Path(name).is_dir()
    if local:
        require_inert(Path(name), what)
        settings["local_files_only"] = True
        _require_named(kind, Path(name))
    # diffusers has nothing to trust, and would take the word for a field of the model's configuration.
    if kind.__module__.startswith("transformers."):
        settings["trust_remote_code"] = False
    if kind.__module__.startswith("diffusers.models."):
        # Where accelerate is installed, loading would replace a function of torch for all threads.
        settings["low_cpu_mem_usage"] = False
    try:
        loaded = kind.from_pretrained(name, **settings)
    except Exception as error:  # these libraries promise no kind of error for unfit files
        if local:
            raise CorruptArtifact(f"{what} {name}: can't be loaded ({brief(error)}); fetch it again") from error
        refused = ConfigError(f"{what} {name}: {brief(error)}")
        refused.passes = _is_of_the_network(error)
        raise refused from error
    chosen = kind.__name__ in NAMED and not isinstance(loaded, tuple)  # by a name in files
    if chosen and type(loaded).__name__ not in NAMED[kind.__name__][2]:
        raise ConfigError(f"{what} {name}: is a {type(loaded).__name__}; {_use(kind)}")
    return loaded


def _is_of_the_network(error: BaseException | None) -> bool:
    """True for an error of the network, or of a hub that is busy: the same may go well later."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None:
        if isinstance(error, HfHubHTTPError) and error.response is not None:
            return error.response.status_code in (408, 429) or error.response.status_code >= 500
        if isinstance(error, (ConnectionError, TimeoutError, httpx.TransportError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def brief(error: BaseException) -> str:
    """An error's kind and message as one line of at most 200 characters."""
    return printable(f"{type(error).__name__}: {error}", 200)


def require_config(name: str, what: str) -> None:
    """CorruptArtifact unless a folder's config is a JSON object, ConfigError if it has none. Names of the hub pass."""
    folder = Path(name)
    if not folder.is_dir():
        return
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{what} {folder}: has no {CONFIG}; name a folder that save_pretrained wrote")
    require_inert(folder, what)


def require_inert(folder: Path, what: str) -> None:
    """CorruptArtifact for a folder that a library would run code of, read other files by, or have no end of work with.

    It holds regular files alone, and of those no code; links stay within it, or in the cache of the hub that it is of.
    """
    for path in sorted(folder.iterdir()):
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):  # a link to nothing, or to itself
            real = Path("/")
        if not any(real.is_relative_to(home) for home in _homes(folder)):
            raise CorruptArtifact(f"{what} {path}: leads out of its folder; put the file itself there")
        if path.is_dir():
            continue
        if not path.is_file():
            raise CorruptArtifact(f"{what} {path}: is no file; fetch it again")
        if path.suffix == ".py" or path.name == ADAPTER:
            raise CorruptArtifact(
                f"{what} {path}: code or an adapter, and neither is run; name a folder of a model alone"
            )
        if path.name in VOCABULARIES:
            require_size(path, MAX_TEXT)
        elif path.suffix == ".json":
            require_size(path)
            # These libraries read no lists, which other tools leave beside a model.
            if path.name in READ or not path.read_bytes().lstrip().startswith(b"["):
                require_plain(read_json(path), path)


def _homes(folder: Path) -> list[Path]:
    """The folder, and where the hub's cache, if it is one, has what is linked to."""
    home = folder.resolve()
    return [home, *(parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots")]


def require_plain(fields: dict[str, Any], path: Path) -> None:
    """CorruptArtifact for fields that have code run, name files elsewhere, or ask for more than a model's layers."""
    if not isinstance(fields.get("_class_name", ""), str):
        raise CorruptArtifact(f"{path}: its _class_name is no name; fetch it again")
    weight_map = fields.get("weight_map", {})
    files = weight_map.values() if isinstance(weight_map, dict) else [weight_map]
    if any(not isinstance(file, str) or Path(file).name != file for file in files):
        raise CorruptArtifact(f"{path}: its weight_map names files that aren't beside it; fetch it again")
    values: list[Any] = [fields]
    while values:
        value = values.pop()
        if isinstance(value, list):
            if path.name == CONFIG and len(value) > MAX_LAYERS:
                raise CorruptArtifact(
                    f"{path}: has a list of {len(value)} items, {MAX_LAYERS} are allowed; fetch it again"
                )
            values += value
            continue
        if not isinstance(value, dict):
            continue
        values += value.values()
        if code := sorted(name for name in CODE & value.keys() if value[name]):
            raise CorruptArtifact(f"{path}: has {code[0]}, and code of others isn't run; name a model that needs none")
        for name, count in value.items():
            if re.search("layers|depth|blocks", name) and isinstance(count, int) and count > MAX_LAYERS:
                raise CorruptArtifact(f"{path}: {name[:60]} is {count:.3g}, {MAX_LAYERS} is the most; fetch it again")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of somebody else. CorruptArtifact; OSError for a file that isn't there."""
    require_size(path)
    return parse_json(path.read_bytes(), path)


def parse_json(data: bytes, where: object) -> dict[str, Any]:
    """The object that JSON of somebody else holds. CorruptArtifact, which begins with `where`, for anything else."""
    try:
        return parse_object(data)
    except json.JSONDecodeError:
        raise CorruptArtifact(f"{where}: not JSON; fetch it again") from None
    except ValueError as error:
        raise CorruptArtifact(f"{where}: {error}; fetch it again") from None


def require_size(path: Path, most: int = MAX_BYTES) -> None:
    """CorruptArtifact for a file of more bytes, or one that is none: a pipe would be read for ever. OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CorruptArtifact(f"{path}: is no file; fetch it again")
    if status.st_size > most:
        raise CorruptArtifact(f"{path}: has {status.st_size} bytes, {most} are allowed; fetch it again")


def _require_named(kind: Any, folder: Path) -> None:
    """CorruptArtifact if a folder names another class for what is loaded than those allowed."""
    file, field, allowed = NAMED.get(kind.__name__, (CONFIG, "", frozenset()))
    named = read_json(folder / file).get(field) if field and (folder / file).is_file() else None
    if named is not None and (not isinstance(named, str) or named not in allowed):
        raise CorruptArtifact(f"{folder / file}: {field} is {printable(repr(named), 60)}; {_use(kind)}")


def _use(kind: Any) -> str:
    return f"use one of {', '.join(sorted(NAMED[kind.__name__][2]))}"


def _numbers_of(folder: Path) -> int:
    """Numbers in all tensors of a folder, as the safetensors' headers have it. CorruptArtifact."""
    numbers = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                numbers += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise CorruptArtifact(f"{file}: {what_else(file)} ({brief(error)}); fetch it again") from None
    return numbers


def _require_modest(kind: Any, name: str, what: str, held: int) -> None:
    """CorruptArtifact for a config of far more numbers than the files hold, which would be drawn in their place."""
    import torch

    try:
        with torch.device("meta"):
            if hasattr(kind, "load_config"):
                model = kind.from_config(kind.load_config(name, local_files_only=True))
            else:
                model = kind(kind.config_class.from_pretrained(name, local_files_only=True))
        numbers = sum(parameter.numel() for parameter in model.parameters())
    except RuntimeError as error:  # of sizes that no tensor has
        raise CorruptArtifact(f"{what} {name}: can't be loaded ({brief(error)}); fetch it again") from error
    except Exception:  # loading it says what is wrong
        return
    if numbers > 2 * held + MAX_DRAWN:
        raise CorruptArtifact(
            f"{what} {name}: is of {numbers} numbers by its {CONFIG}, and its files hold {held}; fetch it again"
        )
