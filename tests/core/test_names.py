"""The one table of names: each is implemented, and nothing is that has no name."""

from typing import get_args

import pytest

from ddm_ray.core import flow, names, routing, solvers


def test_every_name_is_implemented() -> None:
    assert flow.PATHS.keys() == set(get_args(names.PathName))
    assert solvers.SOLVERS.keys() == set(get_args(solvers.SolverName))
    for form in names.STRATEGIES.values():
        assert isinstance(routing.parse_strategy(form.example, 8), routing.Strategy)


def test_a_number_of_too_many_digits_is_no_name() -> None:
    """Python refuses to read integers of more than 4,300 digits, and floats of as many are infinite."""
    for parse, name in (
        (names.parse_strategy_name, "top-" + "9" * 5000),
        (names.parse_strategy_name, "nucleus-0.9-" + "9" * 5000),
        (names.parse_strategy_name, "sample-" + "1" * 5000),
        # In float32 they would be 0, and no expert would have a weight.
        (names.parse_strategy_name, "nucleus-0.9-0." + "0" * 39 + "1"),
        (names.parse_strategy_name, "nucleus-0." + "0" * 45 + "1"),
        (names.parse_time_grid, "shifted-" + "9" * 5000),
    ):
        with pytest.raises(ValueError, match="unknown") as refused:
            parse(name)
        assert len(str(refused.value)) < 400
