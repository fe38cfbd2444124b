"""Seeds of images: consecutive, and apart for every purpose."""

from ddm_ray.core.streams import seeds


def test_seeds_are_consecutive_and_purposes_lie_apart() -> None:
    first, second = seeds(0, 5, purpose=0), seeds(0, 5, purpose=1)
    assert [seed - first[0] for seed in first] == [0, 1, 2, 3, 4]
    assert len({*first, *second, *seeds(1, 5, purpose=0)}) == 15
