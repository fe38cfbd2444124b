"""Images become latents: on a GPU in its own precision, by the same network."""

from pathlib import Path

import numpy as np
import torch

from ddm_ray.config import LatentsConfig
from ddm_ray.data.prepare.encode import EncodeImages
from tests.pretend_streams import pretended
from tests.sampling import tiny_components


def test_on_a_gpu_latents_are_computed_in_bf16_and_waited_for_once(tmp_path: Path) -> None:
    """By the same autoencoder, as its fingerprint says."""
    tiny_components.autoencoder().save_pretrained(tmp_path)
    data = LatentsConfig(autoencoder=str(tmp_path), downsampling=2, scale=0.5, shift=0.1)
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
    plain = EncodeImages(data, 4, 2, "cpu")
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # else torch refuses meta
    try:
        with pretended() as gpu:
            encode = EncodeImages(data, 4, 2, "meta")
            gpu.waits.clear()
            latents_NCHW = encode(pixels_NHWC)
            assert gpu.waits.total() == 1, gpu.waits
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    expected_NCHW = plain(pixels_NHWC)
    assert latents_NCHW.dtype == expected_NCHW.dtype == np.float16
    assert encode.fingerprint() == plain.fingerprint()
    error = np.linalg.norm((latents_NCHW - expected_NCHW).astype(float)) / np.linalg.norm(expected_NCHW.astype(float))
    assert 1e-4 < error < 2e-2
