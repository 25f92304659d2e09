"""`turngym/PythonTool-v0`: answer questions about data that only an interpreter can see.

    The Python interpreter holds a list `data`. What is the sum of all decimal digits ...?
    Answer with <answer>...</answer>.
    python {"code": "digits = ''.join(...)"}          variables are kept between calls
    python {"code": "print(sum(...))"} -> 571
    <answer>571</answer>

Rewards:
    correct (outcome, 1.0)  the only answer given is right
    failed  (turn, 0.1)     -1 for a turn with a call that failed, else 0: a penalty, because a
                            payment for code that merely runs would be farmed
"""

import random
import re
from collections.abc import Mapping

from turngym.envs.calls import make_call
from turngym.envs.core import TurnEnv
from turngym.envs.puzzles import PUZZLES
from turngym.envs.python_session import PythonSession
from turngym.envs.tasks import Draft, TaskSet
from turngym.envs.tools import tool
from turngym.rewards.base import EpisodeView, TurnView, reward
from turngym.types import Action, Task

__all__ = ["PythonTool"]

_ANSWER = re.compile(r"<answer>\s*(\S+)\s*</answer>")
_CELLS = {puzzle.name: puzzle.cells for puzzle in PUZZLES}


class PythonTool(TurnEnv):
    """Work out a puzzle about `data` in a stateful python interpreter."""

    habits = ("guess", "broken_code")

    def __init__(
        self,
        *,
        sandbox: str = "local",
        size: int = 10_000,
        seed: int = 0,
        split: str = "train",
        max_turns: int = 8,
        parse_limit: int | None = 3,
    ) -> None:
        """Choose the puzzles and where code runs.

        Args:
            sandbox: name of the sandbox, see `turngym.envs.resources`.
            size: number of tasks of the split.
            seed: another seed gives other tasks of the same split.
            split: `train`, `eval` or `test`; no puzzle is in two of them.
            max_turns: actions after which the episode is truncated.
            parse_limit: consecutive unreadable actions after which it is truncated.
        """
        super().__init__(split=split, max_turns=max_turns, parse_limit=parse_limit)
        self.sandbox, self.size, self.seed = sandbox, size, seed
        self._python = PythonSession(sandbox)

    def tasks(self, split: str) -> TaskSet:
        """Return generated puzzles; the metadata holds the data."""
        return TaskSet.generate(_draft, split=split, size=self.size, seed=self.seed)

    def start(self, task: Task) -> None:
        """Put the data into a fresh interpreter, which starts with the first call."""
        self._python.close()
        self._python = PythonSession(self.sandbox, (f"data = {task.metadata['data']!r}",))

    # The sandbox keeps the deadline of a cell; this one is for a sandbox that hangs.
    @tool(timeout_s=600)
    def python(self, code: str) -> str:
        """Run Python code and return what it prints. Variables are kept between calls.

        Args:
            code: the code
        """
        return self._python.observe(code)

    @reward(weight=0.1, on="turn", low=-1, high=0)
    def failed(self, turn: TurnView) -> float:
        """-1 for a turn with a call that failed."""
        return -float(any(not result.ok for result in turn.results))

    @reward(weight=1.0, low=0, high=1)
    def correct(self, episode: EpisodeView) -> float:
        """The only answer given is right."""
        return float(_ANSWER.findall(episode.final_answer or "") == [str(episode.task.answer)])

    def expert(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        """Run the puzzle's cells, then answer; `guess` does neither, `broken_code` mistypes."""
        cells = _CELLS[self.task.metadata["puzzle"]]
        printed = [r.text for turn in self.turns for r in turn.results if r.ok]
        guesses = not self.turns and rng.random() < habits.get("guess", 0.0)
        if len(printed) >= len(cells) or guesses:
            answer = str(rng.randint(0, 999)) if guesses else printed[-1].strip()
            return Action(
                role="assistant",
                content=f"<answer>{answer}</answer>",
                reasoning_content="so the answer is",
            )
        code = cells[len(printed)]
        if rng.random() < habits.get("broken_code", 0.0):
            code = code.replace("(", "((", 1)
        return Action(
            role="assistant",
            content="",
            reasoning_content="work it out in Python",
            tool_calls=[make_call("python", {"code": code}, turn=len(self.turns))],
        )

    def save_live(self) -> PythonSession:
        """Copy the interpreter."""
        return self._python.fork()

    def load_live(self, saved: PythonSession) -> None:
        """Continue with a copy of a copied interpreter."""
        self._python.close()
        self._python = saved.fork()

    def close(self) -> None:
        """End the interpreter."""
        super().close()
        self._python.close()


def _draft(rng: random.Random) -> Draft:
    puzzle = rng.choice(PUZZLES)
    data = puzzle.make(rng)
    kind = "text" if isinstance(data, str) else "list"
    return Draft(
        prompt=(
            f"The Python interpreter holds a {kind} `data`. {puzzle.question} "
            "Answer with <answer>...</answer>."
        ),
        answer=puzzle.solve(data),
        metadata={"puzzle": puzzle.name, "data": data},
        key=f"{puzzle.name} {data!r}",
    )
