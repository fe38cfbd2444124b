"""Views of stored rows: mirrored pixels, latents of mirror images, and crops; whoever draws none sees the middle."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddm_ray.core.augmentation import Views
from ddm_ray.data.loading.loader import Loader, load_rows
from ddm_ray.data.schema import HELDOUT
from ddm_ray.run.graph import shard
from ddm_ray.run.run import Run
from tests.random_run import make_data, make_texts

SHARDS = [shard(0), shard(1)]
PLACES = torch.arange(12)
MIRRORED_B = PLACES % 3 == 0


def views(mirrored_B: Tensor, corner: tuple[int, int] = (0, 0)) -> Views:
    return Views(mirrored_B, torch.tensor([corner] * len(mirrored_B)))


def rows_of(run: Run, drawn: Views | None, rows_gib: float = 1, step: int = 4) -> Tensor:
    """Twelve rows of a batch of twenty."""
    with Loader(run, SHARDS, 7, 20, rows_gib, window_bytes=3000) as loader:
        assert loader.in_memory is (rows_gib > 0)
        return loader.batch(step, PLACES, drawn).data_BCHW


@pytest.mark.parametrize("rows_gib", [0, 1])
def test_a_mirrored_batch_is_the_mirror_image_of_the_batch(tmp_path: Path, rows_gib: float) -> None:
    run = make_data(str(tmp_path), settings=("data.horizontal_flips=true",), num_rows=80, row_group_rows=16)
    plain_BCHW = rows_of(run, None, rows_gib)
    assert torch.equal(rows_of(run, views(~MIRRORED_B & MIRRORED_B), rows_gib), plain_BCHW)
    assert torch.equal(rows_of(run, views(MIRRORED_B | ~MIRRORED_B), rows_gib), plain_BCHW.flip(3))
    expected_BCHW = torch.where(MIRRORED_B[:, None, None, None], plain_BCHW.flip(3), plain_BCHW)
    assert torch.equal(rows_of(run, views(MIRRORED_B), rows_gib), expected_BCHW)
    assert not torch.equal(expected_BCHW, plain_BCHW)


def test_flips_that_are_off_leave_every_stored_byte(tmp_path: Path) -> None:
    """Those of pixels are drawn in training: nothing more is stored for them."""
    on, off = (make_data(str(tmp_path / f"{on}"), settings=(f"data.horizontal_flips={on}",)) for on in (True, False))
    assert [on.require(each).files for each in SHARDS] == [off.require(each).files for each in SHARDS]


@pytest.mark.parametrize("rows_gib", [0, 1])
def test_the_mirror_images_latents_are_their_own(tmp_path: Path, rows_gib: float) -> None:
    """An autoencoder doesn't encode a mirror image as the mirrored latents: those of the fixture are one less."""
    run = make_texts(str(tmp_path))
    assert run.config.data.stores_mirrored
    plain_BCHW = rows_of(run, None, rows_gib)
    expected_BCHW = torch.where(MIRRORED_B[:, None, None, None], plain_BCHW - 1, plain_BCHW)
    torch.testing.assert_close(rows_of(run, views(MIRRORED_B), rows_gib), expected_BCHW, atol=0.01, rtol=0)
    other = make_texts(str(tmp_path / "plain"), ("data.horizontal_flips=false",))
    assert torch.equal(load_rows(other, SHARDS).data_NCHW, load_rows(run, SHARDS).data_NCHW)


@pytest.mark.parametrize("rows_gib", [0, 1])
def test_a_crop_is_a_part_of_the_larger_image(tmp_path: Path, rows_gib: float) -> None:
    """The middle one is the row as it is without a margin, for evaluations and for whoever draws no view."""
    plain = make_data(str(tmp_path / "plain"), num_rows=80, row_group_rows=16)
    run = make_data(str(tmp_path / "crops"), settings=("data.crop_margin=3",), num_rows=80, row_group_rows=16)
    unmirrored_B = torch.zeros(12, dtype=torch.bool)
    assert rows_of(run, None, rows_gib).shape == (12, 1, 8, 8)
    for split in ("train", HELDOUT):
        assert torch.equal(load_rows(run, SHARDS, split).data_NCHW, load_rows(plain, SHARDS, split).data_NCHW)
    middle_BCHW = rows_of(run, views(unmirrored_B, (1, 1)), rows_gib)
    assert torch.equal(middle_BCHW, rows_of(run, None, rows_gib))
    # One pixel further right and down, the crop's first 7 x 7 pixels are the middle one's last.
    moved_BCHW = rows_of(run, views(unmirrored_B, (2, 2)), rows_gib)
    assert torch.equal(moved_BCHW[:, :, :-1, :-1], middle_BCHW[:, :, 1:, 1:])
    corners = [rows_of(run, views(unmirrored_B, corner), rows_gib) for corner in ((0, 0), (3, 3), (0, 3))]
    assert torch.equal(corners[0][:, :, 1:, 1:], middle_BCHW[:, :, :-1, :-1])
    assert not any(torch.equal(each, middle_BCHW) for each in corners)
    assert torch.equal(rows_of(run, views(~unmirrored_B, (0, 3)), rows_gib), corners[2].flip(3))
