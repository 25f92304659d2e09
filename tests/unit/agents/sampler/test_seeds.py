from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.seeds import derive

parts = st.lists(st.one_of(st.integers(), st.text()), max_size=4)


def test_seeds_are_the_same_in_every_process() -> None:
    assert derive(7, "sample", 3, 1) == 66682136593130546


def test_the_boundary_and_the_type_of_parts_count() -> None:
    assert len({derive(1, "ab", "c"), derive(1, "a", "bc"), derive(1, "abc")}) == 3
    assert len({derive(1, 2), derive(1, "2"), derive(12), derive(1, 2, "")}) == 4


@settings(deadline=None)
@given(seed=st.integers(), first=parts, second=parts)
def test_different_uses_get_different_seeds_below_two_to_the_63(
    seed: int, first: list[int | str], second: list[int | str]
) -> None:
    assert 0 <= derive(seed, *first) < 2**63
    assert (derive(seed, *first) == derive(seed, *second)) == (first == second)
