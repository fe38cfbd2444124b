"""Seeds of images: consecutive, and apart for every purpose."""

from ddm_ray.core.streams import SeedPurpose, consecutive_seeds, stream


def test_seeds_are_consecutive_and_purposes_lie_apart() -> None:
    first, second = consecutive_seeds(0, 5, SeedPurpose.EVALUATION), consecutive_seeds(0, 5, SeedPurpose.GRID)
    assert [seed - first[0] for seed in first] == [0, 1, 2, 3, 4]
    assert len({*first, *second, *consecutive_seeds(1, 5, SeedPurpose.EVALUATION)}) == 15


def test_purposes_keep_their_numbers() -> None:
    """Pictures of runs made before are of these seeds."""
    numbers = [2968811710, 3964924996, 3141116543, 2613022947, 1874364848]
    assert [consecutive_seeds(0, 1, purpose)[0] for purpose in SeedPurpose] == numbers


def test_every_bit_of_a_seed_and_every_part_of_a_key_counts() -> None:
    keys = [
        (seed, *key) for seed in (0, 5, 5 + 2**32, 5 + 2**40, 2**64 - 1) for key in ((), (0,), (1,), (0, 0), (0, 1))
    ]
    first = {key: tuple(stream(*key).integers(0, 2**63, 4).tolist()) for key in keys}
    assert len({*first.values()}) == len(keys)
    assert all(tuple(stream(*key).integers(0, 2**63, 4).tolist()) == drawn for key, drawn in first.items())
