"""Items are read in order, a few of them ahead."""

import threading

import pytest

from ddm_ray.data.read_ahead import read_ahead


@pytest.mark.parametrize("ahead", [1, 4])
def test_items_come_in_order_and_few_are_read_ahead(ahead: int) -> None:
    begun = [threading.Event() for _ in range(12)]

    def read(number: int) -> int:
        begun[number].set()
        if number % 2 and number + 1 < len(begun) and ahead > 1:
            assert begun[number + 1].wait(10)  # a later item that is begun before this one is read
        return number

    for number, result in enumerate(read_ahead(read, range(12), ahead)):
        assert result == number
        assert all(event.wait(10) for event in begun[: number + 1 + ahead])
        assert not any(event.is_set() for event in begun[number + 1 + ahead :])
    assert number == 11


def test_an_error_comes_in_its_turn() -> None:
    def read(number: int) -> int:
        if number == 2:
            raise ValueError(number)
        return number

    results = read_ahead(read, range(5), 3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="2"):
        next(results)
    assert list(read_ahead(read, [], 3)) == []
