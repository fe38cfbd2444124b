"""Import of a checkpoint laid out as Paris's: the networks compute what a reference does, or an error says why not."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddm_ray.core.condition import Text
from ddm_ray.errors import (
    ConfigError,
    CorruptArtifact,
    DDMError,
    ExpertCountError,
    MissingArtifact,
    SamplingError,
    TruncatedWeights,
)
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.paris_weights import Reading, load_network
from tests.sampling import paris_reference as reference
from tests.sampling.tiny_components import TEXT_DIM, TOKENS

EXPERT_FILE, ROUTER_FILE = "diffusion_pytorch_model.safetensors", "router/pytorch_model.safetensors"
PROMPTS = ["a cat", "", "dog"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write(tmp_path_factory.mktemp("paris") / "checkpoint")


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> DDMPipeline:
    return DDMPipeline.from_pretrained(checkpoint)


def inputs() -> tuple[torch.Tensor, torch.Tensor, Text]:
    """Four rows, in float64: in float32 an angle of 1000 t is known to no better than 6e-5."""
    generator = torch.Generator().manual_seed(0)
    x_BCHW = torch.randn(4, 4, reference.SIZE, reference.SIZE, generator=generator, dtype=torch.float64)
    mask_BL = torch.arange(TOKENS) < torch.tensor([1, 4, TOKENS, 2])[:, None]
    text = Text(torch.randn(4, TOKENS, TEXT_DIM, generator=generator, dtype=torch.float64), mask_BL)
    return x_BCHW, torch.tensor([0.0, 0.2501, 0.9, 1.0], dtype=torch.float64), text


def theirs(file: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in load_file(file).items()}


@torch.no_grad()
def ours(model: torch.nn.Module, *arguments: Any) -> torch.Tensor:
    return copy.deepcopy(model).double()(*arguments)


@pytest.mark.parametrize("number", range(reference.NUM_EXPERTS))
def test_an_imported_expert_is_the_reference(checkpoint: Path, pipeline: DDMPipeline, number: int) -> None:
    x_BCHW, t_B, text = inputs()
    weights = theirs(checkpoint / f"expert_{number}" / EXPERT_FILE)
    expected = reference.expert(weights, reference.EXPERT, x_BCHW, t_B, text.tokens_BLE, text.mask_BL)
    assert expected.std() > 0.1
    velocity_BCHW = ours(pipeline.models.experts[number], x_BCHW, t_B, text)
    torch.testing.assert_close(velocity_BCHW, expected, atol=1e-5, rtol=0)


def test_the_imported_router_is_the_reference(checkpoint: Path, pipeline: DDMPipeline) -> None:
    x_BCHW, t_B, text = inputs()
    expected = reference.router(theirs(checkpoint / ROUTER_FILE), reference.ROUTER, x_BCHW, t_B)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(pipeline.models.router, x_BCHW, t_B, text), expected, atol=1e-5, rtol=0)


def test_a_class_conditioned_expert_with_adaln_zero_is_the_reference(tmp_path: Path) -> None:
    x_BCHW, t_B, _ = inputs()
    label_B = torch.tensor([0, 4, 5, 2])
    save_file(reference.weights(reference.LABELLED, 7), tmp_path / EXPERT_FILE)
    shape = {"image_size": 8, "channels": 4, "patch_size": 2, "width": 16, "depth": 2, "heads": 2}
    model = load_network(tmp_path / EXPERT_FILE, {"class": "DiT", "config": {**shape, "num_classes": 5}})
    expected = reference.expert(theirs(tmp_path / EXPERT_FILE), reference.LABELLED, x_BCHW, t_B, label_B, None)
    torch.testing.assert_close(ours(model, x_BCHW, t_B, label_B), expected, atol=1e-5, rtol=0)


def test_with_noise_at_0_time_and_velocity_turn_round(checkpoint: Path, pipeline: DDMPipeline) -> None:
    x_BCHW, t_B, text = inputs()
    turned = DDMPipeline.from_pretrained(checkpoint, time="noise-at-0").models
    weights = theirs(checkpoint / "expert_1" / EXPERT_FILE)
    velocity = -reference.expert(weights, reference.EXPERT, x_BCHW, 1 - t_B, text.tokens_BLE, text.mask_BL)
    logits = reference.router(theirs(checkpoint / ROUTER_FILE), reference.ROUTER, x_BCHW, 1 - t_B)
    torch.testing.assert_close(ours(turned.experts[1], x_BCHW, t_B, text), velocity, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours(turned.router, x_BCHW, t_B, text), logits, atol=1e-5, rtol=0)
    # And is another model than the one read the other way.
    assert (ours(pipeline.models.experts[1], x_BCHW, t_B, text) - velocity).abs().max() > 0.1
    with pytest.raises(ConfigError, match="time is 'backwards': use noise-at-1 or noise-at-0"):
        DDMPipeline.from_pretrained(checkpoint, time="backwards")


def test_a_prompt_becomes_pictures(pipeline: DDMPipeline) -> None:
    output = pipeline(PROMPTS, num_inference_steps=3, seeds=1)
    assert [(image.mode, image.size) for image in output.images] == [("RGB", (16, 16))] * 3
    assert output.prompts == tuple(PROMPTS)
    # top-2 of three experts, guided: two branches.
    assert (output.num_expert_rows, output.num_router_rows) == (3 * 3 * 2 * 2, 3 * 3)
    assert ((output.routing_SBK > 0).sum(dim=2) == 2).all()


@pytest.mark.parametrize("strategy", ["once", "full"])
def test_the_text_guides_and_the_seed_decides(pipeline: DDMPipeline, strategy: str) -> None:
    settings: dict[str, Any] = {"num_inference_steps": 3, "strategy": strategy, "output_type": "latent"}
    first, second = (pipeline(prompt, seeds=5, **settings).images for prompt in ("cat", "dog"))
    assert first.shape == (1, 4, 8, 8)
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(pipeline("cat", seeds=5, **settings).images, first)
    unconditional = pipeline(["cat", None], guidance_scale=0, seeds=[5, 5], **settings).images
    torch.testing.assert_close(unconditional[0], unconditional[1], atol=1e-4, rtol=0)


def test_latents_are_decoded(pipeline: DDMPipeline) -> None:
    latent = pipeline(PROMPTS * 4, num_inference_steps=2, seeds=1, output_type="latent").images
    images = pipeline(PROMPTS * 4, num_inference_steps=2, seeds=1, output_type="pt").images
    expected = (pipeline.components.latents.decode(latent) / 2 + 0.5).clamp(0, 1)
    assert images.shape == (12, 3, 16, 16)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("offload", [None, "disk", "host"])
def test_it_survives_a_round_trip(pipeline: DDMPipeline, checkpoint: Path, tmp_path: Path, offload: str) -> None:
    DDMPipeline.from_pretrained(checkpoint, offload=None if offload == "host" else offload).save_pretrained(
        tmp_path / "saved"
    )
    again = DDMPipeline.from_pretrained(tmp_path / "saved", offload=offload)
    for strategy in ("top-2", "once"):
        expected = pipeline(PROMPTS, num_inference_steps=2, seeds=3, strategy=strategy, output_type="pt").images
        images = again(PROMPTS, num_inference_steps=2, seeds=3, strategy=strategy, output_type="pt").images
        if strategy == "once" and offload:
            # Expert by expert: other batches, other low bits.
            torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
        else:
            assert torch.equal(images, expected)


def test_a_text_model_says_what_to_give(pipeline: DDMPipeline) -> None:
    for arguments, message in (
        ({"class_labels": [1]}, "give prompt in place of class_labels"),
        ({}, "give either prompt: one, or a list"),
        ({"prompt": []}, "prompt is empty"),
    ):
        with pytest.raises(SamplingError, match=message):
            pipeline(**arguments)
    bare = DDMPipeline(pipeline.models)
    with pytest.raises(SamplingError, match="no text_encoder"):
        bare("a cat", output_type="latent")
    with pytest.raises(SamplingError, match=r"4 channels are no picture .* use output_type latent"):
        bare(pipeline.components.text_encoder.encode(["a cat"]))
    text = pipeline.components.text_encoder.encode(PROMPTS)
    settings: dict[str, Any] = {"num_inference_steps": 2, "seeds": 3, "output_type": "latent"}
    encoded = bare(text, strategy="top-2", guidance_scale=7.5, **settings).images
    assert torch.equal(encoded, pipeline(PROMPTS, **settings).images)


# -- What can be wrong with a checkpoint: one line each, naming the file and the tensor ------------------------------


def edit_json(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text())
    fields.update(changes)
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def altered(change: Callable[[dict[str, torch.Tensor]], Any], file: str = f"expert_1/{EXPERT_FILE}"):
    return lambda root: edit_tensors(root / file, change)


KV = "blocks.1.cross_attn.kv_linear.weight"
FAULTS: list[tuple[Callable[[Path], Any], type[DDMError], str]] = [
    (
        altered(lambda tensors: tensors.pop(KV)),
        CorruptArtifact,
        rf"expert_1/{EXPERT_FILE}: lacks the tensor blocks\.1\.cross_attn\.kv_linear\.weight",
    ),
    (
        altered(lambda tensors: tensors.update({KV: torch.zeros(16, 16)})),
        CorruptArtifact,
        rf"expert_1/{EXPERT_FILE}: tensor blocks\.1\.cross.*\.weight has shape \(16, 16\), expected \(32, 16\)",
    ),
    (
        altered(lambda tensors: tensors.update({"x_embedder.proj.weight": torch.zeros(16, 16)})),
        CorruptArtifact,
        r"x_embedder\.proj\.weight has shape \(16, 16\), expected \(16, 4, 2, 2\)",
    ),
    (
        altered(lambda tensors: tensors.update({"y_embedder.y_embedding": torch.zeros(9, 12)})),
        CorruptArtifact,
        r"expert_1/.*: unknown tensor y_embedder\.y_embedding: say what it is",
    ),
    (
        altered(lambda tensors: tensors.update({"blocks.2.mlp.fc1.bias": torch.zeros(64)})),
        CorruptArtifact,
        r"tensor blocks\.2\.mlp\.fc1\.bias \(our .*\) is none of a DiT's",
    ),
    (
        altered(lambda tensors: tensors.update({"head.bias": torch.zeros(16)})),
        CorruptArtifact,
        r"tensors .* and .* are both our head\.bias",
    ),
    (
        altered(lambda tensors: tensors.update({"pos_embed": tensors["pos_embed"] + 1e-3})),
        CorruptArtifact,
        r"tensor pos_embed differs by 0\.001 from the fixed sine-cosine table",
    ),
    (
        altered(lambda tensors: tensors.update({"pos_embed": torch.zeros(1, 4, 16)})),
        CorruptArtifact,
        r"tensor pos_embed has shape \(1, 4, 16\), expected \(1, 16, 16\)",
    ),
    (
        altered(lambda tensors: tensors.pop("cls_token"), ROUTER_FILE),
        CorruptArtifact,
        r"router/pytorch_model\.safetensors: lacks the tensor cls_token",
    ),
    (
        lambda root: (root / "expert_2" / EXPERT_FILE).write_bytes(
            (root / "expert_2" / EXPERT_FILE).read_bytes()[:-100]
        ),
        TruncatedWeights,
        rf"expert_2/{EXPERT_FILE}: not whole safetensors",
    ),
    (lambda root: shutil.rmtree(root / "expert_2"), MissingArtifact, r"expert_2/config\.json is missing"),
    (lambda root: shutil.rmtree(root / "router"), MissingArtifact, r"router/config\.json is missing"),
    (lambda root: shutil.rmtree(root / "vae"), MissingArtifact, "lacks the folder vae"),
    (lambda root: shutil.rmtree(root / "tokenizer"), MissingArtifact, "lacks the folder tokenizer"),
    (lambda root: (root / "expert_0" / EXPERT_FILE).unlink(), MissingArtifact, rf"expert_0/{EXPERT_FILE} is missing"),
    (
        lambda root: shutil.copytree(root / "expert_0", root / "expert_3"),
        ExpertCountError,
        r"speaks of 3 experts, 4 folders expert_N",
    ),
    (
        lambda root: edit_json(root / "router/config.json", num_clusters=4),
        ExpertCountError,
        "the router speaks of 4 experts, the mixture has 3",
    ),
    (
        lambda root: edit_json(root / "expert_0/config.json", hidden_size=None),
        CorruptArtifact,
        r"expert_0/config\.json: lacks the field hidden_size",
    ),
    (
        lambda root: edit_json(root / "config.json", image_size=None),
        CorruptArtifact,
        r"checkpoint/config\.json: lacks the field image_size",
    ),
    (
        lambda root: edit_json(root / "expert_0/config.json", out_channels=8),
        CorruptArtifact,
        r"expert_0/config\.json: out_channels is 8, a velocity has 4",
    ),
    (
        lambda root: edit_json(root / "expert_0/config.json", hidden_size=18),
        CorruptArtifact,
        r"expert_0/config\.json: model spec: .*width 18 must be a multiple of 4",
    ),
    (
        lambda root: edit_json(root / "router/config.json", use_dit_time_embed=False),
        CorruptArtifact,
        r"router/config\.json: use_dit_time_embed is False",
    ),
    (
        lambda root: (root / "expert_1/config.json").write_text("{"),
        CorruptArtifact,
        r"expert_1/config\.json: not JSON",
    ),
    (
        lambda root: edit_json(root / "model_index.json", tokenizer=["transformers", "Nonesuch"]),
        CorruptArtifact,
        r"tokenizer is \['transformers', 'Nonesuch'\]; of transformers, use one of CLIPTokenizer",
    ),
]


@pytest.mark.parametrize(("fault", "kind", "message"), FAULTS)
def test_what_is_wrong_is_said_in_one_line(
    checkpoint: Path, tmp_path: Path, fault: Callable[[Path], Any], kind: type[DDMError], message: str
) -> None:
    reference.check_refused(checkpoint, tmp_path, fault, kind, message)


def test_the_caller_can_name_what_files_call_otherwise(checkpoint: Path, tmp_path: Path) -> None:
    """Files with other names, and a tensor that is left out on purpose, are the same network."""
    root = shutil.copytree(checkpoint, tmp_path / "checkpoint")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".attn.qkv" in name]:
            tensors[name.replace("attn.qkv", "self.in")] = tensors.pop(name)
        tensors["patches"] = tensors.pop("x_embedder.proj.weight")
        tensors["y_embedder.y_embedding"] = torch.zeros(9, 12)

    edit_tensors(root / "expert_0" / EXPERT_FILE, rename)
    names = {
        "blocks.N.self.in": "trunk.blocks.N.attention.qkv",
        "patches": "trunk.patch_in.weight",
        "y_embedder.y_embedding": None,
    }
    imported = DDMPipeline.from_pretrained(root, names=names).models.experts[0].state_dict()
    expected = DDMPipeline.from_pretrained(checkpoint).models.experts[0].state_dict()
    assert all(torch.equal(imported[name], expected[name]) for name in expected)


def test_a_row_of_zeros_for_the_cls_token_is_let_pass(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / ROUTER_FILE)
    tensors["pos_embed"] = torch.cat([torch.zeros(1, 1, 8), tensors["pos_embed"]], dim=1)
    save_file(tensors, tmp_path / "router.safetensors")
    router = DDMPipeline.from_pretrained(checkpoint).models.router
    spec = {"class": "Router", "config": router.config}
    loaded = load_network(tmp_path / "router.safetensors", spec, Reading()).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in router.state_dict().items())
