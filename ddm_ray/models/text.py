"""Text encoders: prompts become conditions.

Shapes: B prompts, L tokens, E and P channels of the tokens and of the pooled vector.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Self

import torch

from ddm_ray.config import TextConfig
from ddm_ray.core.condition import Text, TextIds
from ddm_ray.errors import ConfigError, DDMError
from ddm_ray.models import third_party
from ddm_ray.models.fingerprints import fingerprint_of, require_same_network
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.hub import network_folder
from ddm_ray.models.text_tokens import encode_ids, tokenize
from ddm_ray.remedies import Begin

MODELS = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}
OTHER_HALF = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale", "lm_head.")
"""Beginnings of the tensors that a whole CLIP or T5 has and its text model doesn't."""


class TextEncoder:
    """A text model of transformers and its tokenizer: prompts -> Text of `tokens` tokens each, on its device.

    Padding is masked, in the encoder too. The pooled vectors are those of `pooled`, another encoder, if there is
    one; else the model's own, if it has them (CLIP has, T5 hasn't). Without `keeps_pooled` texts have none. No
    `tokens`: the most that the model takes. ConfigError if it takes fewer, or if there is no most.
    """

    def __init__(
        self,
        tokenizer: Any,
        model: Any,
        tokens: int | None,
        pooled: "TextEncoder | None" = None,
        keeps_pooled: bool = True,
    ) -> None:
        self.tokens = _num_tokens(model.config, tokens)
        self.tokenizer, self.model, self.pooled = tokenizer, model.eval(), pooled
        self.keeps_pooled = keeps_pooled

    @classmethod
    def from_pretrained(cls, name: str, tokens: int | None, pooled: Self | None = None) -> Self:
        """From a folder, or a name of the hub, that holds a CLIP's or T5's text encoder with its tokenizer.

        ConfigError if there is none, and without transformers; CorruptArtifact if it isn't whole.
        """
        kind, what = _kind(name), "text encoder"
        import transformers

        tokenizer = third_party.load_pretrained(transformers.AutoTokenizer, name, what)
        return cls(tokenizer, third_party.load_pretrained_model(kind, name, what, OTHER_HALF), tokens, pooled)

    @classmethod
    def from_config(cls, config: TextConfig, known: str | None = None) -> Self:
        """The encoder (or two) of a run; its fingerprint is `known` if it has made rows already.

        Its texts have the shape that the configuration says: a pooled vector only with `pooled_dim`. ConfigError as
        `from_pretrained`, and for other sizes than the run's; DriftError for another network.
        """
        _require_sizes(config, *(_about(name) for name in _names(config)))
        pooled = None
        if config.pooled_encoder is not None:
            pooled = cls.from_pretrained(config.pooled_encoder, None)
        encoder = cls.from_pretrained(config.encoder, config.tokens, pooled)
        encoder.keeps_pooled = config.pooled_dim is not None
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
        for counts, lost in filter(None, self.cuts(prompts) if warn else ()):
            warnings.warn(f"a prompt {counts} loses: {lost}", stacklevel=2)
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
        pooled_BP = text.pooled_BP.float() if self.keeps_pooled and text.pooled_BP is not None else None
        return replace(text, tokens_BLE=text.tokens_BLE.float(), pooled_BP=pooled_BP)

    def lengths(self, prompts: Sequence[str]) -> list[int]:
        """Each prompt's number of tokens, of which `tokens` at most count; those of the other encoder aren't told."""
        return [len(ids) for ids in self._ids(prompts)]

    def cuts(self, prompts: Sequence[str]) -> list[tuple[str, str] | None]:
        """Subjects of sentences on what is cut off each prompt, by this encoder or the other one; None if nothing.

        "of 90 tokens, of which 77 count," and the words that are lost.
        """
        own: list[tuple[str, str] | None] = []
        for ids in self._ids(prompts):
            lost = " ".join(self.tokenizer.decode(ids[self.tokens - 1 : -1]).split())
            cut = f"of {len(ids)} tokens, of which {self.tokens} count,", lost
            own.append(cut if len(ids) > self.tokens else None)
        others = self.pooled.cuts(prompts) if self.pooled else own
        return [cut or other for cut, other in zip(own, others, strict=True)]

    def null(self) -> Text:
        """The null condition, one row: the empty prompt."""
        return self.encode([""])

    def _ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Each prompt's tokens, all of them."""
        return self.tokenizer(list(prompts), verbose=False)["input_ids"]


def known_parameters(config: TextConfig) -> int | None:
    """Number of parameters of a run's text encoder, with the pooled one's; None where this machine can't tell.

    Only configurations are read, of folders or what this machine's cache has.
    """
    folders = [network_folder(name) for name in _names(config)]
    try:
        return sum(_parameters(str(folder)) for folder in folders) if all(folders) else None
    except DDMError:  # loading it says what is wrong
        return None


def require_known_encoders(config: TextConfig) -> None:
    """Raise ConfigError for a text encoder of other sizes than the run's, where this machine can tell, as above."""
    folders = [network_folder(name) for name in _names(config)]
    if all(folders) and find_spec("transformers"):  # else loading it says so
        _require_sizes(config, *(_about(str(folder)) for folder in folders))


def _names(config: TextConfig) -> list[str]:
    """The text encoder, and any other one that the pooled vector is of."""
    return [config.encoder, *([config.pooled_encoder] if config.pooled_encoder else [])]


def _require_sizes(config: TextConfig, about: Any, pooled_about: Any = None) -> None:
    """Raise ConfigError unless encoders of these configurations of transformers' make texts as the run has them."""
    if about.hidden_size != config.dim:
        fix = Begin(field="data.text.dim", value=f"{about.hidden_size}")
        raise ConfigError(f"text encoder {config.encoder} has {about.hidden_size} channels, not {config.dim}", fix)
    _num_tokens(about, config.tokens)
    if config.pooled_dim is None:
        return
    what, its = f"text encoder {config.pooled_encoder or config.encoder}", pooled_about or about
    if not its.model_type.startswith("clip"):
        leave = "set data.text.pooled_encoder to a CLIP, or leave out data.text.pooled_dim, in a new run"
        raise ConfigError(f"{what} has no pooled vector, data.text.pooled_dim is {config.pooled_dim}", leave)
    if its.hidden_size != config.pooled_dim:
        fix = Begin(field="data.text.pooled_dim", value=f"{its.hidden_size}")
        raise ConfigError(f"{what}: its pooled vector has {its.hidden_size} channels, not {config.pooled_dim}", fix)


def _num_tokens(about: Any, tokens: int | None) -> int:
    """Tokens that a text model of this configuration is to read; None: its most. ConfigError for more than these."""
    most: int | None = getattr(about, "max_position_embeddings", None)
    num_tokens, name = most if tokens is None else tokens, MODELS.get(about.model_type, about.model_type)
    if num_tokens is None:
        raise ConfigError(f"{name} takes texts of any length: say how many tokens")
    if most is not None and num_tokens > most:
        fix = Begin(field="data.text.tokens", value=f"{most}")
        raise ConfigError(f"{name} takes {most} tokens at most, not {num_tokens}", fix)
    return num_tokens


@lru_cache(maxsize=8)
def _parameters(folder: str) -> int:
    with torch.device("meta"):
        return num_parameters(_kind(folder)(_about(folder)))


def _about(name: str) -> Any:
    """The configuration of the text model that a folder, or a name of the hub, has, as transformers reads it."""
    return third_party.load_pretrained(_kind(name).config_class, name, "text encoder")


def _kind(name: str) -> Any:
    """The class of the text model that a folder, or a name of the hub, has."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("texts need transformers: install it with: pip install 'ddm-ray[text]'") from None
    what = "text encoder"
    third_party.require_config(name, what)
    kind = third_party.load_pretrained(transformers.AutoConfig, name, what).model_type
    if kind not in MODELS:
        raise ConfigError(f"{what} {name}: is a {kind}, use one of {', '.join(MODELS)}")
    return getattr(transformers, MODELS[kind])
