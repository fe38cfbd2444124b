"""Prompts become tokens, masks and pooled vectors, by real transformers models of random weights."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from ddm_ray.config import TextConfig
from ddm_ray.core.condition import Text
from ddm_ray.errors import ConfigError, CorruptArtifact
from ddm_ray.models.text import TextEncoder

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "red", "blue", "cat", "dog", "on", "the", "moon"]
PROMPTS = ["a red cat", "a blue dog on the moon", ""]


def tokenizer(begins: bool) -> PreTrainedTokenizerFast:
    """Words of a tiny vocabulary; texts end with </s>, and begin with <s> as CLIP's do, or not, as T5's."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if begins else "$A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def clip_model() -> CLIPTextModel:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return CLIPTextModel(CLIPTextConfig(vocab_size=12, max_position_embeddings=10, **size, **special))


@pytest.fixture(scope="module")
def t5_model() -> T5EncoderModel:
    torch.manual_seed(1)
    return T5EncoderModel(T5Config(vocab_size=12, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3))


@pytest.fixture(scope="module")
def clip(clip_model: CLIPTextModel) -> TextEncoder:
    return TextEncoder(tokenizer(begins=True), clip_model, 8)


@pytest.fixture(scope="module")
def t5(t5_model: T5EncoderModel) -> TextEncoder:
    return TextEncoder(tokenizer(begins=False), t5_model, 12)


@pytest.fixture
def folders(tmp_path: Path, clip_model: CLIPTextModel, t5_model: T5EncoderModel) -> tuple[str, str]:
    """Folders of CLIP's text model and of T5's encoder, each with its tokenizer."""
    for name, model, begins in (("clip", clip_model, True), ("t5", t5_model, False)):
        model.save_pretrained(tmp_path / name)
        tokenizer(begins).save_pretrained(tmp_path / name)
    return str(tmp_path / "clip"), str(tmp_path / "t5")


def test_clip_gives_tokens_mask_and_pooled_vector(clip: TextEncoder, clip_model: CLIPTextModel) -> None:
    text = clip.encode(PROMPTS)
    assert (text.tokens_BLE.shape, text.mask_BL.shape) == ((3, 8, 16), (3, 8))
    assert text.mask_BL.dtype == torch.bool
    assert text.mask_BL.sum(1).tolist() == [5, 8, 2]
    ids = torch.tensor([[1, 4, 5, 7, 2]])
    alone = clip_model(input_ids=ids)
    torch.testing.assert_close(text.tokens_BLE[0, :5], alone.last_hidden_state[0])
    assert text.pooled_BP is not None
    torch.testing.assert_close(text.pooled_BP[0], alone.pooler_output[0])
    assert (text.tokens_BLE[~text.mask_BL] == 0).all()
    assert not text.tokens_BLE.requires_grad


def test_t5_gives_tokens_and_no_pooled_vector(t5: TextEncoder, t5_model: T5EncoderModel) -> None:
    text = t5.encode(PROMPTS)
    assert text.tokens_BLE.shape == (3, 12, 24)
    assert text.mask_BL.sum(1).tolist() == [4, 7, 1]
    assert text.pooled_BP is None
    assert (text.tokens_BLE[~text.mask_BL] == 0).all()
    alone = t5_model(input_ids=torch.tensor([[4, 5, 7, 2]])).last_hidden_state[0]
    torch.testing.assert_close(text.tokens_BLE[0, :4], alone, msg="padding must not be seen by the encoder")


def test_another_encoder_may_give_the_pooled_vector(clip: TextEncoder, t5_model: T5EncoderModel) -> None:
    both = TextEncoder(tokenizer(begins=False), t5_model, 12, pooled=clip)
    text, pooled_BP = both.encode(PROMPTS), clip.encode(PROMPTS).pooled_BP
    assert text.tokens_BLE.shape == (3, 12, 24)
    assert text.pooled_BP is not None
    assert pooled_BP is not None
    assert torch.equal(text.pooled_BP, pooled_BP)


@pytest.mark.parametrize("name", ["clip", "t5"])
def test_a_prompt_is_encoded_alike_alone_and_among_others(name: str, request: pytest.FixtureRequest) -> None:
    encoder: TextEncoder = request.getfixturevalue(name)
    together = encoder.encode(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone = encoder.encode([prompt])
        assert torch.equal(alone.mask_BL[0], together.mask_BL[row])
        torch.testing.assert_close(alone.tokens_BLE[0], together.tokens_BLE[row])
    null = encoder.null()
    assert len(null) == 1
    torch.testing.assert_close(null.tokens_BLE[0], together.tokens_BLE[2])


def test_a_prompt_too_long_is_cut_and_what_is_lost_is_said(clip: TextEncoder) -> None:
    with pytest.warns(UserWarning, match=r"^a prompt of 9 tokens, of which 8 count, loses: moon$") as caught:
        cut = clip.encode(["a red dog on the blue moon", "a cat"])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert cut.mask_BL.sum(1).tolist() == [8, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(cut.tokens_BLE[0], clip.encode(["a red dog on the blue"]).tokens_BLE[0])
        assert_same(clip.encode(["a red dog on the blue moon", "a cat"], warn=False), cut)


def test_an_encoder_is_read_from_a_folder(folders: tuple[str, str], clip: TextEncoder, t5: TextEncoder) -> None:
    for folder, encoder in zip(folders, (clip, t5), strict=True):
        again = TextEncoder.from_pretrained(folder, encoder.tokens)
        assert_same(again.encode(PROMPTS), encoder.encode(PROMPTS))
    assert TextEncoder.from_pretrained(folders[0], None).tokens == 10


def test_the_encoders_of_a_run(folders: tuple[str, str], clip_model: CLIPTextModel, t5: TextEncoder) -> None:
    clip_folder, t5_folder = folders
    config = TextConfig(encoder=t5_folder, tokens=12, dim=24, pooled_encoder=clip_folder, pooled_dim=16)
    text = TextEncoder.from_config(config).to("cpu").encode(PROMPTS)
    pooled_encoder = TextEncoder(tokenizer(begins=True), clip_model, 10)
    assert_same(
        text, Text(t5.encode(PROMPTS).tokens_BLE, t5.encode(PROMPTS).mask_BL, pooled_encoder.encode(PROMPTS).pooled_BP)
    )
    without = TextEncoder.from_config(TextConfig(encoder=clip_folder, tokens=8, dim=16)).encode(["a"])
    assert without.mask_BL.sum() == 3
    assert without.pooled_BP is None, "the run has no pooled vector, though CLIP has"


def test_what_does_not_fit_a_run_is_told(folders: tuple[str, str], tmp_path: Path) -> None:
    clip_folder, t5_folder = folders
    BertConfig().save_pretrained(tmp_path / "bert")
    for config, message in (
        (TextConfig(encoder=clip_folder, tokens=11, dim=16), "CLIPTextModel takes 10 tokens at most, not 11"),
        (
            TextConfig(encoder=clip_folder, tokens=8, dim=24),
            "has 16 channels, not 24; begin a run with data.text.dim=16",
        ),
        (TextConfig(encoder=t5_folder, tokens=8, dim=24, pooled_dim=16), "t5 has no pooled vector"),
        (TextConfig(encoder=clip_folder, tokens=8, dim=16, pooled_dim=9), "its pooled vector has 16 channels, not 9"),
        (TextConfig(encoder=str(tmp_path / "bert"), tokens=8, dim=9), "is a bert, use one of clip"),
        (TextConfig(encoder=str(tmp_path), tokens=8, dim=9), f"text encoder {tmp_path}: "),
    ):
        with pytest.raises(ConfigError) as failure:
            TextEncoder.from_config(config)
        assert message in str(failure.value)
        assert "\n" not in str(failure.value)
    with pytest.raises(ConfigError, match="T5EncoderModel takes texts of any length: say how many tokens"):
        TextEncoder.from_pretrained(t5_folder, None)


def test_an_encoder_that_is_not_whole_is_refused(folders: tuple[str, str]) -> None:
    """transformers itself would draw at random what a file lacks."""
    folder, file = folders[0], Path(folders[0]) / "model.safetensors"
    intact = load_file(file)
    name = sorted(name for name in intact if "layer_norm" in name)[0]
    for tensors, message in (
        ({key: tensor for key, tensor in intact.items() if key != name}, "lacks the tensor .*layer_norm"),
        (intact | {name: torch.zeros(1)}, "has another shape than its config says: tensor .*layer_norm"),
        (intact | {"stray": torch.zeros(1)}, "is no .* alone: has the tensor stray"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CorruptArtifact, match=f"^text encoder {folder}: {message}.*; fetch it again$"):
            TextEncoder.from_pretrained(folder, 8)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptArtifact, match=f"^{file}: not whole safetensors"):
        TextEncoder.from_pretrained(folder, 8)
    file.unlink()
    torch.save(intact, Path(folder) / "pytorch_model.bin")
    with pytest.raises(CorruptArtifact, match=f"^text encoder {folder}: can't be loaded"):
        TextEncoder.from_pretrained(folder, 8)
    (Path(folder) / "config.json").write_text("[]")
    with pytest.raises(CorruptArtifact, match=r"config\.json: not an object; fetch it again$"):
        TextEncoder.from_pretrained(folder, 8)


def test_a_whole_clip_has_a_text_model(tmp_path: Path, clip_model: CLIPTextModel, clip: TextEncoder) -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=clip_model.config.to_dict(), vision_config={**small, "image_size": 8, "patch_size": 4}
    )
    full_clip = CLIPModel(config)
    full_clip.text_model.load_state_dict(clip_model.state_dict())
    full_clip.save_pretrained(tmp_path)
    tokenizer(begins=True).save_pretrained(tmp_path)
    assert_same(TextEncoder.from_pretrained(str(tmp_path), 8).encode(PROMPTS), clip.encode(PROMPTS))


@pytest.mark.parametrize(("implementation", "axes"), [("sdpa", 4), ("eager", 4), ("flash_attention_2", 2)])
def test_attention_is_told_what_counts_as_it_takes_it(
    clip: TextEncoder, monkeypatch: pytest.MonkeyPatch, implementation: str, axes: int
) -> None:
    """A bias is added by those that add; that on a GPU which unpads takes which tokens count."""
    given, forward = list[int](), clip.model.forward

    def seen(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> object:
        given.append(attention_mask.ndim)
        monkeypatch.setattr(clip.model.config, "_attn_implementation_internal", "sdpa")  # the other needs a GPU
        return forward(input_ids=input_ids)

    monkeypatch.setattr(clip.model, "forward", seen)
    monkeypatch.setattr(clip.model.config, "_attn_implementation_internal", implementation)
    clip.encode(PROMPTS)
    assert given == [axes]


def test_without_transformers_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"^texts need transformers: install it with: pip install 'ddm-ray\[text\]'$"):
        TextEncoder.from_pretrained("anywhere", 8)


def assert_same(one: Text, other: Text) -> None:
    torch.testing.assert_close(one.tokens_BLE, other.tokens_BLE)
    assert torch.equal(one.mask_BL, other.mask_BL)
    torch.testing.assert_close(one.pooled_BP, other.pooled_BP)
