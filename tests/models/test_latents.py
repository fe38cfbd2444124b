"""Latents by a real AutoencoderKL of random weights."""

import sys
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddm_ray.config import LatentsConfig
from ddm_ray.errors import ConfigError, CorruptArtifact
from ddm_ray.models.latents import Latents


@pytest.fixture(scope="module")
def autoencoder() -> AutoencoderKL:
    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (8, 8, 16),
    }
    return AutoencoderKL(latent_channels=4, norm_num_groups=4, scaling_factor=0.3, shift_factor=0.1, **blocks)


@pytest.fixture(scope="module")
def images_BCHW() -> Tensor:
    return torch.rand(3, 3, 16, 24, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_latents_are_shifted_and_scaled(autoencoder: AutoencoderKL, images_BCHW: Tensor) -> None:
    latents = Latents(autoencoder, scale=0.5, shift=0.2)
    encoded_BCHW = latents.encode(images_BCHW)
    assert encoded_BCHW.shape == (3, 4, 4, 6)
    assert latents.downsampling == 4
    with torch.no_grad():
        mean_BCHW = autoencoder.encode(images_BCHW).latent_dist.mean
        decoded_BCHW = autoencoder.decode(mean_BCHW).sample
    torch.testing.assert_close(encoded_BCHW, (mean_BCHW - 0.2) * 0.5)
    assert latents.decode(encoded_BCHW).shape == images_BCHW.shape
    torch.testing.assert_close(latents.decode(encoded_BCHW), decoded_BCHW)
    assert not encoded_BCHW.requires_grad


def test_a_generator_samples_the_posterior(autoencoder: AutoencoderKL, images_BCHW: Tensor) -> None:
    latents = Latents(autoencoder, scale=0.5, shift=0.2)
    draws = [latents.encode(images_BCHW, torch.Generator().manual_seed(seed)) for seed in (0, 0, *range(1, 400))]
    assert torch.equal(draws[0], draws[1])
    posterior = autoencoder.encode(images_BCHW).latent_dist
    spread_BCHW = 0.5 * posterior.std.detach()
    drawn_NBCHW = torch.stack(draws[1:])
    standard_error = (drawn_NBCHW.mean(0) - latents.encode(images_BCHW)) / (spread_BCHW / 20)
    assert standard_error.abs().max() < 5
    torch.testing.assert_close(drawn_NBCHW.std(0), spread_BCHW, rtol=0.2, atol=0)


def test_an_autoencoder_is_read_from_a_folder(tmp_path: Path, autoencoder: AutoencoderKL, images_BCHW: Tensor) -> None:
    autoencoder.save_pretrained(tmp_path / "vae")
    own = Latents.from_pretrained(str(tmp_path / "vae"))
    assert (own.scale, own.shift) == (0.3, 0.1)
    config = LatentsConfig(autoencoder=str(tmp_path / "vae"), downsampling=4, scale=0.18215)
    runs = Latents.from_config(config).to("cpu")
    assert (runs.scale, runs.shift) == (0.18215, 0.0)
    expected_BCHW = Latents(autoencoder, 0.18215).encode(images_BCHW)
    assert torch.equal(runs.encode(images_BCHW), expected_BCHW)


def test_an_autoencoder_that_does_not_fit_is_refused(tmp_path: Path, autoencoder: AutoencoderKL) -> None:
    autoencoder.save_pretrained(tmp_path / "vae")
    with pytest.raises(ConfigError, match=r"begin a run with data\.latents\.downsampling=4$"):
        Latents.from_config(LatentsConfig(autoencoder=str(tmp_path / "vae"), scale=1.0))
    with pytest.raises(ConfigError, match=f"^autoencoder {tmp_path}: ") as failure:
        Latents.from_pretrained(str(tmp_path))
    assert "\n" not in str(failure.value)


def test_an_autoencoder_that_is_not_whole_is_refused(tmp_path: Path, autoencoder: AutoencoderKL) -> None:
    """diffusers itself would draw at random what a file lacks."""
    folder = tmp_path / "vae"
    autoencoder.save_pretrained(folder)
    assert Latents.from_pretrained(str(folder)).channels == 4
    file = folder / "diffusion_pytorch_model.safetensors"
    intact = load_file(file)
    name = "decoder.conv_in.weight"
    for tensors, message in (
        ({key: tensor for key, tensor in intact.items() if key != name}, rf"lacks the tensor {name}"),
        (intact | {name: torch.zeros(1)}, rf"has another shape than its config says: tensor {name}"),
        (intact | {"stray": torch.zeros(1)}, "is no AutoencoderKL alone: has the tensor stray"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CorruptArtifact, match=f"^autoencoder {folder}: {message}; fetch it again$"):
            Latents.from_pretrained(str(folder))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptArtifact, match=f"^{file}: not whole safetensors"):
        Latents.from_pretrained(str(folder))
    # A pickle beside it is no way out.
    file.unlink()
    torch.save(intact, file.with_suffix(".bin"))
    with pytest.raises(CorruptArtifact, match=f"^autoencoder {folder}: can't be loaded"):
        Latents.from_pretrained(str(folder))
    for text, message in (("[]", "not an object"), ("{", "not JSON")):
        (folder / "config.json").write_text(text)
        with pytest.raises(CorruptArtifact, match=rf"config\.json: {message}; fetch it again$"):
            Latents.from_pretrained(str(folder))


def test_without_diffusers_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"^latents need diffusers: install it with: pip install 'ddm-ray\[diff"):
        Latents.from_pretrained("anywhere")
