from ddm_ray.data.reasons import CUT, MAX_REASONS, commonest


def test_reasons_that_differ_in_numbers_and_names_are_one() -> None:
    rows = [{"id": f"a/{row}", "reason": f"label {row} is not in 0..9"} for row in range(12)]
    rows += [{"id": f"b/{row}", "reason": f"'class {row}' is none of the 4 classes"} for row in range(20)]
    first, second = commonest(rows[:14]), commonest(rows[14:])
    assert commonest([*first, *second]) == [
        {"id": "b/0", "reason": "'class 0' is none of the 4 classes", "rows": 20},
        {"id": "a/0", "reason": "label 0 is not in 0..9", "rows": 12},
    ]
    assert len(commonest({"id": "x", "reason": "x" * row} for row in range(40))) == MAX_REASONS


def test_what_stands_for_many_rows_is_never_left_out() -> None:
    rows = [{"id": f"{kind}{row}", "reason": f"reason {kind}"} for kind in "abcdefghijkl" for row in range(3)]
    cut = {"id": "x.tar/….end", "reason": f"{CUT} and the rest lost, at or before byte 5 of 7: unexpected end of data"}
    assert commonest([*rows, cut])[0] == {**cut, "rows": 1}
    assert [reason["id"] for reason in commonest([*rows, cut])[1:]] == [f"{kind}0" for kind in "abcdefghi"]
