"""Networks of other sizes than the run's are refused by their own configurations, before any work."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from transformers import T5Config, T5EncoderModel

from ddm_ray import cli
from ddm_ray.data.prepare.stage import prepare, require_known_sizes
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import ConfigError
from ddm_ray.run.run import Run
from tests.models.test_text import tokenizer
from tests.sampling import tiny_components

DIM, TOKENS = tiny_components.TEXT_DIM, tiny_components.TOKENS
POOLED = {"pooled_dim": DIM}
WRONG = {
    "channels of CLIP": ({"dim": 16}, {}, "data.text.dim=12"),
    "channels of T5": ({"encoder": "t5", "dim": 16}, {}, "data.text.dim=20"),
    "more tokens than CLIP reads": ({"tokens": TOKENS + 1}, {}, "data.text.tokens=9"),
    "channels of a pooled vector": ({"pooled_dim": 16}, {}, "data.text.pooled_dim=12"),
    "channels of another's pooled vector": (
        {"pooled_encoder": "clip", "pooled_dim": 16},
        {},
        "data.text.pooled_dim=12",
    ),
    "a pooled vector of T5": ({"encoder": "t5", "dim": 20, **POOLED}, {}, "set data.text.pooled_encoder to a CLIP"),
    "another's pooled vector, of T5": (
        {"pooled_encoder": "t5", **POOLED},
        {},
        "set data.text.pooled_encoder to a CLIP",
    ),
    "pixels of a latent": ({}, {"downsampling": 4}, "data.latents.downsampling=2"),
    "channels of a latent": ({}, {"channels": 8}, "data.channels=4"),
}
"""Fields of `data.text`, of `data.latents` or `data`, and what is said to set."""


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folders clip, t5 and vae."""
    root = tmp_path_factory.mktemp("networks")
    tiny_components.text_model().save_pretrained(root / "clip")
    tiny_components.tokenizer(root / "clip").save_pretrained(root / "clip")
    sizes = {"d_model": 20, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5EncoderModel(T5Config(vocab_size=12, **sizes)).save_pretrained(root / "t5")
    tokenizer(begins=False).save_pretrained(root / "t5")
    tiny_components.autoencoder().save_pretrained(root / "vae")
    return root


def init(url: Path, networks: Path, text: dict[str, object], latents: dict[str, object], *words: str) -> Result:
    """`ddm init` of a run of captions and latents, which fit CLIP's and the autoencoder's but for these fields."""
    text = {"encoder": "clip", "tokens": TOKENS, "dim": DIM} | text
    text |= {name: str(networks / str(text[name])) for name in ("encoder", "pooled_encoder") if name in text}
    fields = {"autoencoder": str(networks / "vae"), "downsampling": 2, "scale": 0.5} | latents
    channels = fields.pop("channels", 4)
    data = {"source": "shapes:40", "image_size": 4, "channels": channels, "text": text, "latents": fields}
    settings = (f"data={json.dumps(data)}", "embedder.kind=pixels", "partition={num_clusters: 2, num_fine: 4}")
    given = [word for setting in settings for word in ("--set", setting)]
    return CliRunner().invoke(cli.main, ["init", str(url), "--recipe", "laion256-k8", *given, *words])


@pytest.mark.parametrize(("text", "latents", "fix"), WRONG.values(), ids=WRONG.keys())
def test_networks_of_other_sizes_are_refused(
    tmp_path: Path, networks: Path, text: dict[str, object], latents: dict[str, object], fix: str
) -> None:
    assert init(tmp_path / "run", networks, text, latents, "--unseen").exit_code == 0
    with pytest.raises(ConfigError, match=fix):
        require_known_sizes(Run.open(str(tmp_path / "run")).config.data)


def test_they_are_refused_before_any_work(tmp_path: Path, networks: Path) -> None:
    refused = init(tmp_path / "refused", networks, {"dim": 16}, {})
    assert refused.exit_code == 1
    assert "data.text.dim 12" in refused.output.replace("=", " ") and "Traceback" not in refused.output
    assert not (tmp_path / "refused").exists()
    # Begun on another machine, it is the one that prepares whose networks count.
    assert init(tmp_path / "run", networks, {"dim": 16}, {}, "--unseen").exit_code == 0
    with pytest.raises(ConfigError, match=r"data.text.dim=12"):
        prepare(Run.open(str(tmp_path / "run")), execute=serial)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.json"}


def test_networks_that_fit_or_are_elsewhere_are_taken(tmp_path: Path, networks: Path) -> None:
    assert init(tmp_path / "fits", networks, POOLED, {}).exit_code == 0
    assert init(tmp_path / "elsewhere", tmp_path / "nothing", {"dim": 16}, {"downsampling": 4}).exit_code == 0
