"""Text encoders: prompts become conditions.

Shapes: B prompts, L tokens, E and P channels of the tokens and of the pooled vector.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self

import torch

from ddm_ray.config import TextConfig
from ddm_ray.core.condition import Text, TextIds
from ddm_ray.errors import ConfigError, DDMError
from ddm_ray.models import third_party
from ddm_ray.models.fingerprints import fingerprint_of, require_same_network
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.hub import folder_of
from ddm_ray.models.text_tokens import encode_ids, tokenize
from ddm_ray.remedies import Begin

MODELS = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}
OTHER_HALF = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale", "lm_head.")
"""Beginnings of the tensors that a whole CLIP or T5 has and its text model doesn't."""


class TextEncoder:
    """A text model of transformers and its tokenizer: prompts -> Text of `tokens` tokens each, on its device.

    Padding is masked, in the encoder too. The pooled vectors are those of `pooled`, another encoder, if there is
    one; else the model's own, if it has them (CLIP has, T5 hasn't).
    """

    def __init__(self, tokenizer: Any, model: Any, tokens: int | None, pooled: "TextEncoder | None" = None) -> None:
        most: int | None = getattr(model.config, "max_position_embeddings", None)
        num_tokens = most if tokens is None else tokens
        if num_tokens is None:
            raise ConfigError(f"{type(model).__name__} takes texts of any length: say how many tokens")
        if most is not None and num_tokens > most:
            fix = Begin(field="data.text.tokens", value=f"{most}")
            raise ConfigError(f"{type(model).__name__} takes {most} tokens at most, not {num_tokens}", fix)
        self.tokenizer, self.model, self.pooled = tokenizer, model.eval(), pooled
        self.tokens: int = num_tokens

    @classmethod
    def from_components(cls, tokenizer: Any, model: Any, tokens: int | None, pooled: Self | None = None) -> Self:
        """From a tokenizer and a CLIPTextModel or T5EncoderModel; no `tokens`: the most that it takes.

        ConfigError if it takes fewer, or if there is no most.
        """
        return cls(tokenizer, model, tokens, pooled)

    @classmethod
    def from_pretrained(cls, name: str, tokens: int | None, pooled: Self | None = None) -> Self:
        """From a folder, or a name of the hub, that holds a CLIP's or T5's text encoder with its tokenizer.

        ConfigError if there is none, and without transformers; CorruptArtifact, TruncatedWeights if it isn't whole.
        """
        kind, what = _kind(name), "text encoder"
        import transformers

        tokenizer = third_party.load(transformers.AutoTokenizer, name, what)
        return cls(tokenizer, third_party.load_model(kind, name, what, OTHER_HALF), tokens, pooled)

    @classmethod
    def from_config(cls, config: TextConfig, known: str | None = None) -> Self:
        """The encoder (or two) of a run, whose fingerprint is `known` if it has made rows already.

        ConfigError as `from_pretrained`, and for other sizes than the run's; DriftError for another network.
        """
        pooled = None
        if config.pooled_encoder is not None:
            pooled = cls.from_pretrained(config.pooled_encoder, None)
        encoder = cls.from_pretrained(config.encoder, config.tokens, pooled)
        dim, pooled_dim = encoder._sizes()
        if dim != config.dim:
            fix = Begin(field="data.text.dim", value=f"{dim}")
            raise ConfigError(f"text encoder {config.encoder} has {dim} channels, not {config.dim}", fix)
        if config.pooled_dim is not None and pooled_dim != config.pooled_dim:
            raise ConfigError(
                f"text encoder {config.encoder}: its pooled vector has size {pooled_dim}, data.text.pooled_dim"
                f" is {config.pooled_dim}"
            )
        if known is not None:
            require_same_network(f"text encoder {config.encoder}", encoder.fingerprint(), known)
        return encoder

    def fingerprint(self) -> str:
        """16 hex digits that other weights or another vocabulary would change, also of the pooled one's."""
        pooled = self.pooled.fingerprint() if self.pooled else None
        return fingerprint_of(self.model, [sorted(self.tokenizer.get_vocab().items()), self.tokens, pooled])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Moves the model, and the pooled one's. Whatever precision they compute in, texts are float32."""
        self.model.to(device=device, dtype=dtype)
        if self.pooled is not None:
            self.pooled.to(device, dtype)
        return self

    def encode(self, prompts: Sequence[str], warn: bool = True) -> Text:
        """The prompts' Text, padded to `tokens` with zeros. What is beyond them is cut off, and named in a warning."""
        if warn:
            self._warn_of_cuts(prompts)
            if self.pooled is not None:
                self.pooled._warn_of_cuts(prompts)
        return self.encode_ids(self.ids(prompts).to(self.model.device))

    def ids(self, prompts: Sequence[str]) -> TextIds:
        """The prompts' ids, on the CPU, padded to `tokens`; what is beyond them is cut off."""
        ids = tokenize(self.tokenizer, prompts, self.tokens)
        return replace(ids, pooled=self.pooled.ids(prompts)) if self.pooled else ids

    def encode_ids(self, ids: TextIds) -> Text:
        """The Text of ids of this encoder's tokenizer (and the pooled one's), on the model's device."""
        text = encode_ids(self.model, ids)
        if self.pooled is not None:
            assert ids.pooled is not None
            text = replace(text, pooled_BP=self.pooled.encode_ids(ids.pooled).pooled_BP)
        pooled_BP = None if text.pooled_BP is None else text.pooled_BP.float()
        return replace(text, tokens_BLE=text.tokens_BLE.float(), pooled_BP=pooled_BP)

    def lengths(self, prompts: Sequence[str]) -> list[int]:
        """Each prompt's number of tokens, of which `tokens` at most count; those of the other encoder aren't told."""
        return [len(ids) for ids in self._ids(prompts)]

    def null(self) -> Text:
        """The null condition, one row: the empty prompt."""
        return self.encode([""])

    def _sizes(self) -> tuple[int, int | None]:
        """Channels of its tokens and of its pooled vector, by one token: a CPU takes seconds for all of T5-XL's."""
        text = self.encode_ids(self.ids([""]).cut(1).to(self.model.device))
        return text.tokens_BLE.shape[2], None if text.pooled_BP is None else text.pooled_BP.shape[1]

    def _ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Each prompt's tokens, all of them."""
        return self.tokenizer(list(prompts), verbose=False)["input_ids"]

    def _warn_of_cuts(self, prompts: Sequence[str]) -> None:
        for ids in self._ids(prompts):
            if len(ids) > self.tokens:
                lost = " ".join(self.tokenizer.decode(ids[self.tokens - 1 : -1]).split())
                message = f"a prompt of {len(ids)} tokens, of which {self.tokens} count, loses: {lost}"
                warnings.warn(message, stacklevel=3)


def known_parameters(config: TextConfig) -> int | None:
    """Number of parameters of a run's text encoder, with the pooled one's; None where this machine can't tell.

    Only configurations are read, of folders or what this machine's cache has.
    """
    number = 0
    for name in filter(None, (config.encoder, config.pooled_encoder)):
        folder = folder_of(name)
        if folder is None:
            return None
        try:
            number += _parameters(str(folder))
        except DDMError:  # who loads it says what is wrong
            return None
    return number


def known_flops_per_row(config: TextConfig) -> int | None:
    """FLOPs of encoding a row's texts, 2 a parameter and token, a little more than they are; None as above."""
    parameters = known_parameters(config)
    return None if parameters is None else 2 * parameters * config.tokens


@lru_cache(maxsize=8)
def _parameters(folder: str) -> int:
    kind = _kind(folder)
    with torch.device("meta"):
        return num_parameters(kind(third_party.load(kind.config_class, folder, "text encoder")))


def _kind(name: str) -> Any:
    """The class of the text model that a folder, or a name of the hub, has."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("texts need transformers: install it with: pip install 'ddm-ray[text]'") from None
    what = "text encoder"
    third_party.require_config(name, what)
    kind = third_party.load(transformers.AutoConfig, name, what).model_type
    if kind not in MODELS:
        raise ConfigError(f"{what} {name}: is a {kind}, use one of {', '.join(MODELS)}")
    return getattr(transformers, MODELS[kind])
