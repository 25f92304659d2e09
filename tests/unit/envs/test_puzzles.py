import contextlib
import io
import random
import re
from typing import Any

import pytest

from turngym.envs.puzzles import PUZZLES, Puzzle
from turngym.envs.word_problems import draw


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)
def test_an_experts_cells_print_the_right_answer(puzzle: Puzzle) -> None:
    for seed in range(20):
        data = puzzle.make(random.Random(seed))
        names: dict[str, Any] = {"data": data}
        for cell in puzzle.cells:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(cell, names)
        assert printed.getvalue().strip() == str(puzzle.solve(data))


def test_answers_of_small_puzzles_are_right() -> None:
    solve = {puzzle.name: puzzle.solve for puzzle in PUZZLES}
    assert solve["even_pairs"]([1, 3, 2, 5]) == 3
    assert solve["digit_sum"]([-12, 7]) == 10
    assert solve["widest_gap"]([9, 1, 3]) == 6
    assert solve["median"]([-1, 2]) == 0
    assert solve["median"]([-2, 1]) == -1
    assert solve["most_common"]("b a b a c") == "a"
    assert solve["distinct_long"]("katemi katemi lo rutesa") == 2
    assert solve["vowels_at_odd_places"]("kalo mi") == 2


def test_the_worked_solutions_of_word_problems_add_up() -> None:
    seen = set()
    for seed in range(400):
        problem = draw(random.Random(seed))
        seen.add(re.sub(r"\d+", "#", problem.question)[:12])
        equations = re.findall(r"([\d+*/-]+)=(\d+)", problem.solution)
        assert equations
        for left, right in equations:
            assert eval(left) == int(right), problem
        assert str(problem.answer) in problem.solution
    assert len(seen) > 8
