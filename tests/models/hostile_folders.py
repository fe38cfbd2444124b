"""Checkpoint folders of somebody who wants code to be run by whoever opens them; each would write the file CANARY."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddm_ray.config import EmbedderConfig
from ddm_ray.models.clip import Clip
from ddm_ray.models.embedder_networks import TimmEmbedder, TransformersEmbedder
from ddm_ray.models.latents import Latents
from ddm_ray.models.text import TextEncoder
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.manifest import FileRecord, canonical, sha256
from tests.sampling import tiny_components

CODE = """
open({canary!r}, "w").close()
from transformers import CLIPTextConfig as Config, CLIPTextModel as Model, CLIPTokenizer as Tokenizer
from diffusers import DiffusionPipeline as Evil
"""
Change = Callable[[Path], Any]


class Payload:
    """Code that a pickle runs."""

    def __init__(self, canary: str):
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mknod, (self.canary,)


@dataclass(frozen=True)
class Hostile:
    """A sound folder of a kind, `change`d, and whoever opens it."""

    name: str
    base: str
    change: Change
    opens: Callable[[str], Any]


def text(folder: str) -> Any:
    return TextEncoder.from_pretrained(folder, None)


def image(folder: str) -> Any:
    return TransformersEmbedder(EmbedderConfig(kind="transformers", model=folder))


def timm(file: str) -> Change:
    def opens(folder: str) -> Any:
        args = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 28}
        name, checkpoint = ("vit_tiny_patch16_224", f"{folder}/{file}") if "." in file else (f"{file}{folder}", None)
        return TimmEmbedder(EmbedderConfig(kind="timm", model=name, checkpoint=checkpoint, model_args=args))

    return opens


def fields(name: str, **values: Any) -> Change:
    """A JSON file with other fields."""

    def change(root: Path) -> None:
        path = root / name
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(known | values))

    return change


def bytes_of(name: str, data: bytes, size: int | None = None) -> Change:
    """A file of other bytes, and as large as that, with nothing behind them."""

    def change(root: Path) -> None:
        (root / name).unlink(missing_ok=True)
        (root / name).write_bytes(data)
        if size is not None:
            os.truncate(root / name, size)

    return change


def link(name: str, target: str) -> Change:
    def change(root: Path) -> None:
        kept = root.parent / f"{root.name}.kept"
        (root / name).rename(kept)
        (root / name).symlink_to(str(kept) if target == "kept" else target)

    return change


def pipe(name: str) -> Change:
    def change(root: Path) -> None:
        (root / name).unlink()
        os.mkfifo(root / name)

    return change


def pickled(name: str, replaces: str = "*.safetensors") -> Change:
    """A pickle with a payload, in place of the weights."""

    def change(root: Path) -> None:
        for path in (root / name).parent.glob(replaces):
            path.unlink()
        torch.save({"weight": Payload(str(root.parent / "CANARY"))}, root / name)

    return change


def renamed(name: str, **values: Any) -> Change:
    """The weights under another name, of which an index tells."""

    def change(root: Path) -> None:
        (weights,) = root.glob("*.safetensors")
        weights.rename(root.parent / "outside.safetensors")
        (root / f"{weights.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": values or [name]}))

    return change


def resealed(change: Change) -> Change:
    """A pipeline of ours whose index knows of the change, as its author would have it."""

    def changed(root: Path) -> None:
        change(root)
        path = root / "model_index.json"
        index = json.loads(path.read_text())
        index.pop("checksum")
        for name in index["files"]:
            if (root / name).is_file():
                record = FileRecord.of_file(root / name)
                index["files"][name] = {"bytes": record.bytes, "sha256": record.sha256}
        path.write_text(json.dumps({**index, "checksum": sha256(canonical(index))}))

    return changed


TEXT_FAULTS: dict[str, Change] = {
    "auto_map of another type": fields(
        "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    ),
    "auto_map elsewhere": fields("config.json", auto_map={"AutoModel": "evil/evil--evil.Model"}),
    "auto_map within": fields("config.json", text_config={"auto_map": {"AutoConfig": "evil.Config"}}),
    "auto_map of the tokenizer": fields("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}),
    "auto_map as a list": fields("tokenizer_config.json", auto_map=["evil.Tokenizer", None], tokenizer_class="Evil"),
    "trust": fields("config.json", trust_remote_code=True),
    "quantization": fields("config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "kernels": fields("config.json", attn_implementation="evil/kernel"),
    "an adapter": fields("adapter_config.json", base_model_name_or_path="evil/evil", peft_type="LORA"),
    "code beside": lambda root: shutil.copy(root.parent / "evil.py", root / "pipeline.py"),
    "pickled weights": pickled("pytorch_model.bin"),
    "a pickle by another name": pickled("model.safetensors"),
    "a pickled shard": lambda root: (
        pickled("shard.bin")(root),
        fields("pytorch_model.bin.index.json", metadata={}, weight_map={"weight": "shard.bin"})(root),
    ),
    "a link out": link("model.safetensors", "kept"),
    "a link to itself": link("config.json", "config.json"),
    "a vocabulary elsewhere": link("tokenizer.json", "/etc/passwd"),
    "a pipe for a config": pipe("config.json"),
    "a pipe for weights": pipe("model.safetensors"),
    "a deep config": bytes_of("config.json", b"[" * 10**7),
    "a config of 1 GiB": bytes_of("config.json", b"{", 1 << 30),
    "a header of 1 EiB": bytes_of("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}"),
    "an index out": renamed("", weight="../outside.safetensors"),
    "an index that is none": renamed("evil"),
    "another tokenizer": fields("tokenizer_config.json", tokenizer_class="BertJapaneseTokenizer"),
    "no tokenizer's name": fields("tokenizer_config.json", tokenizer_class=["evil", "Tokenizer"]),
    "a type elsewhere": fields("config.json", model_type="../../evil"),
    "layers without end": fields("config.json", num_hidden_layers=10**7),
    "words without end": fields("config.json", vocab_size=10**10),
    "a list without end": fields("config.json", architectures=["Evil"] * 10**5),
}
VAE_FAULTS: dict[str, Change] = {
    "another module's": fields("config.json", _class_name=["evil", "Evil"]),
    "auto_map": fields("config.json", auto_map={"AutoModel": "evil.Evil"}),
    "pickled weights": pickled("diffusion_pytorch_model.bin"),
    "layers without end": fields("config.json", layers_per_block=10**7),
    "channels without end": fields("config.json", latent_channels=10**9),
    "an index out": renamed("", weight="../outside.safetensors"),
}
IMAGE_FAULTS: dict[str, Change] = {
    "auto_map": fields("config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"}),
    "auto_map of the processor": fields("preprocessor_config.json", auto_map={"AutoImageProcessor": "evil.Evil"}),
    "another processor": fields("preprocessor_config.json", image_processor_type="TimmWrapperImageProcessor"),
    "a wrapper": fields("config.json", model_type="timm_wrapper", architecture="hf-hub:evil/evil"),
    "a detector": fields("config.json", model_type="detr", architectures=["DetrModel"]),
    "pickled weights": pickled("pytorch_model.bin"),
}
OURS_FAULTS: dict[str, Change] = {
    "any model": fields("model_index.json", text_encoder=["transformers", "AutoModel"]),
    "a module": fields("model_index.json", text_encoder=["evil", "Model"]),
    "auto_map": fields("text_encoder/config.json", auto_map={"AutoModel": "evil.Model"}),
    "auto_map of the tokenizer": fields(
        "tokenizer/tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}
    ),
    "a vae's class": fields("vae/config.json", _class_name=["evil", "Evil"]),
    "a deep index": bytes_of("expert_000/config.json", b"[" * 10**7),
    "layers without end": fields("expert_000/config.json", depth=10**7),
    "positions without end": fields("router/config.json", image_size=10**6, patch_size=1),
    "a pickle by another name": pickled("expert_000/diffusion_pytorch_model.safetensors"),
    "a pipe for weights": pipe("expert_000/diffusion_pytorch_model.safetensors"),
}


def pipeline(folder: str) -> Any:
    return DDMPipeline.from_pretrained(folder)


HOSTILE = [
    *(Hostile(f"text: {name}", "text", change, text) for name, change in TEXT_FAULTS.items()),
    *(Hostile(f"vae: {name}", "vae", change, Latents.from_pretrained) for name, change in VAE_FAULTS.items()),
    *(Hostile(f"image: {name}", "image", change, image) for name, change in IMAGE_FAULTS.items()),
    Hostile("clip: auto_map", "text", TEXT_FAULTS["auto_map of another type"], Clip.from_pretrained),
    *(Hostile(f"timm: {file}", "text", pickled(file), timm(file)) for file in ("vit.pth", "vit.bin", "v.safetensors")),
    Hostile("timm: a folder", "image", IMAGE_FAULTS["a wrapper"], timm("local-dir:")),
    Hostile("ours: an index of 1 GiB", "ours", bytes_of("model_index.json", b"{", 1 << 30), pipeline),
    Hostile("ours: a pipe for an index", "ours", pipe("model_index.json"), pipeline),
    *(Hostile(f"ours: {name}", "ours", resealed(change), pipeline) for name, change in OURS_FAULTS.items()),
]


def write_bases(root: Path) -> None:
    """Sound folders of each kind, and the file with code that none of them should run."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    tiny_components.text_model().save_pretrained(root / "text")
    tiny_components.tokenizer(root / "letters").save_pretrained(root / "text")
    tiny_components.autoencoder().save_pretrained(root / "vae")
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**size)).save_pretrained(root / "image")
    BitImageProcessor(crop_size={"height": 28, "width": 28}).save_pretrained(root / "image")
    tiny_components.texts(root / "letters").save_pretrained(root / "ours")
    (root / "evil.py").write_text(CODE.format(canary=str(root / "CANARY")))


def made(root: Path, hostile: Hostile, number: int) -> Path:
    """The folder, and in each second one the code that it names: that alone isn't why it is refused."""
    folder = Path(shutil.copytree(root / hostile.base, root / f"hostile{number}"))
    hostile.change(folder)
    if number % 2 == 0 and "auto_map" in hostile.name:
        for config in [*folder.rglob("*config.json")]:
            shutil.copy(root / "evil.py", config.parent / "evil.py")
    return folder
