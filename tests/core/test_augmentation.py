"""Views of rows are drawn by the seed, the job and the step alone; each is as likely as it should be."""

import math
from collections import Counter

import torch

from ddm_ray.core.augmentation import Augmentation

KEY = (2, 0)


def test_rows_as_they_are_draw_nothing() -> None:
    assert Augmentation().draw(0, KEY, 0, 8) is None


def test_a_step_is_drawn_for_itself() -> None:
    both = Augmentation(mirrors=True, margin=4)
    views = [both.draw(seed, key, step, 64) for seed, key, step in ((0, KEY, 5), (0, KEY, 5), (1, KEY, 5), (0, KEY, 6))]
    others = both.draw(0, (2, 1), 5, 64)
    first, again, *different = (each for each in (*views, others) if each is not None)
    assert torch.equal(first.mirrored_B, again.mirrored_B) and torch.equal(first.corner_B2, again.corner_B2)
    assert len(different) == 3
    for other in different:
        assert not torch.equal(first.mirrored_B, other.mirrored_B)
        assert not torch.equal(first.corner_B2, other.corner_B2)


def test_views_are_equally_likely() -> None:
    views = Augmentation(mirrors=True, margin=2).draw(3, KEY, 0, 18_000)
    assert views is not None
    kinds = Counter(zip(views.mirrored_B.tolist(), *views.corner_B2.T.tolist(), strict=True))
    assert len(kinds) == 2 * 3 * 3
    # Binomial: five standard deviations.
    assert all(abs(count - 1000) < 5 * math.sqrt(1000) for count in kinds.values())


def test_what_isnt_asked_for_isnt_done() -> None:
    mirrored, cropped = (each.draw(0, KEY, 0, 64) for each in (Augmentation(mirrors=True), Augmentation(margin=3)))
    assert mirrored is not None and not mirrored.corner_B2.any() and mirrored.mirrored_B.any()
    assert cropped is not None and not cropped.mirrored_B.any() and cropped.corner_B2.max() == 3
    place_B = torch.tensor([5, 1])
    assert torch.equal(cropped[place_B].corner_B2, cropped.corner_B2[place_B])
