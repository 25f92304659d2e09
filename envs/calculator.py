"""`turngym/Calculator-v0`: arithmetic in words and symbols, solved with a calculator.

    What is 47 times 86, then minus 12?
    think: 47 times 86        calc {"expr": "47*86"}     -> 4042
    think: 4042 minus 12      calc {"expr": "4042-12"}   -> 4030
    think: so the answer is   <answer>4030</answer>

The calculator takes one operation a call, so that questions with several need dependent turns.

Rewards, all at the end, so that a call as such is worth nothing:
    correct (1.0)  the one answer given is right
    tool    (0.5)  answered by the tool: at least one call, none unreadable, invalid or superfluous
    format  (0.5)  the last message is the answer in its tags and nothing else, and every turn
                   thought first (unless `think=False`)
    success (0.0)  all three: the figure to report
"""

import json
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from turngym.envs.calls import make_call
from turngym.envs.core import TurnEnv
from turngym.envs.tasks import Draft, TaskSet
from turngym.envs.tools import tool
from turngym.errors import ConfigError, ToolError
from turngym.rewards.base import EpisodeView, reward
from turngym.types import Action, Message, Task

__all__ = ["Calculator", "calc"]

Notation = Literal["words", "symbols", "mixed"]

_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_WORDS = {"+": "plus", "-": "minus", "*": "times"}
_LEVELS: Mapping[int, tuple[tuple[int, int], int]] = {
    1: ((1, 1), 99),
    2: ((1, 2), 99),
    3: ((1, 3), 999),
    4: ((2, 4), 9999),
}
"""(fewest, most) operations of a question, and the largest operand."""

_BINARY = re.compile(r"\s*(-?\d{1,30})\s*([-+*])\s*(-?\d{1,30})\s*", re.ASCII)
_ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>", re.ASCII)

_INSTRUCTIONS = (
    "Work out the sum with the tool calc, one operation a call. Think briefly before every "
    "message. At the end, answer with <answer>number</answer> and nothing else."
)
_THINK_LAST = "so the answer is"


@tool(timeout_s=2)
def calc(expr: str) -> int:
    """Work out one operation on two whole numbers.

    Args:
        expr: number, operator (+, - or *), number; for example 47*86
    """
    found = _BINARY.fullmatch(expr)
    if found is None:
        raise ToolError("expr must be one operation on two whole numbers, such as 47*86")
    return _OPERATIONS[found[2]](int(found[1]), int(found[3]))


class Calculator(TurnEnv):
    """Answer arithmetic questions with a calculator that does one operation a call."""

    tools = (calc,)
    habits = (
        *("guess", "skip_tool", "broken_json", "wrong_operator"),
        *("no_think", "ignore_result", "stop_early"),
    )

    def __init__(
        self,
        *,
        level: int = 2,
        notation: Notation = "mixed",
        think: bool = True,
        instructions: bool = False,
        size: int = 100_000,
        seed: int = 0,
        split: str = "train",
        max_turns: int = 6,
        parse_limit: int | None = 3,
    ) -> None:
        """Choose the questions.

        Args:
            level: 1 = one operation on numbers up to 99; 2 = one or two; 3 = up to three, numbers
                up to 999; 4 = two to four, up to 9999.
            notation: questions in `words` ("47 times 86"), `symbols` ("47 * 86") or `mixed`.
            think: the format asks for reasoning before every action.
            instructions: explain tool and format in a system message, for models that were not
                taught them by demonstrations.
            size: number of tasks of the split.
            seed: another seed gives other tasks of the same split.
            split: `train`, `eval` or `test`; no question is in two of them.
            max_turns: actions after which the episode is truncated.
            parse_limit: consecutive unreadable actions after which it is truncated.
        """
        super().__init__(split=split, max_turns=max_turns, parse_limit=parse_limit)
        if level not in _LEVELS:
            raise ConfigError(f"level must be one of {sorted(_LEVELS)}, got {level!r}")
        if notation not in ("words", "symbols", "mixed"):
            raise ConfigError(f"notation must be words, symbols or mixed, got {notation!r}")
        self.level, self.notation, self.think = level, notation, think
        self.instructions = instructions
        self.size, self.seed = size, seed

    def tasks(self, split: str) -> TaskSet:
        """Return generated questions; the metadata holds the numbers and the operators."""
        return TaskSet.generate(self._draw, split=split, size=self.size, seed=self.seed)

    def prompt(self, task: Task) -> Sequence[Message]:
        """Ask the question, after the instructions where they are wanted."""
        question: Message = {"role": "user", "content": str(task.prompt)}
        system: Message = {"role": "system", "content": _INSTRUCTIONS}
        return (system, question) if self.instructions else (question,)

    def _draw(self, rng: random.Random) -> Draft:
        (fewest, most), largest = _LEVELS[self.level]
        smallest = 10 if largest == 99 else 2
        count = rng.randint(fewest, most)
        numbers = [rng.randint(smallest, largest) for _ in range(count + 1)]
        operators = [rng.choice(list(_OPERATIONS)) for _ in range(count)]
        in_words = self.notation == "words" or (self.notation == "mixed" and rng.random() < 0.5)
        result = numbers[0]
        for symbol, number in zip(operators, numbers[1:], strict=True):
            result = _OPERATIONS[symbol](result, number)
        return Draft(
            prompt=f"What is {_phrase(numbers, operators, in_words)}?",
            answer=result,
            metadata={"numbers": numbers, "operators": operators, "in_words": in_words},
            # The same sum in words and in symbols is the same problem.
            key=_phrase(numbers, operators, in_words=False),
        )

    @reward(weight=1.0, low=0, high=1)
    def correct(self, episode: EpisodeView) -> float:
        """The only answer given is right."""
        answers = _ANSWER.findall(episode.final_answer or "")
        return float(len(answers) == 1 and _equal(answers[0], episode.task.answer))

    @reward(weight=0.5, low=0, high=1, name="tool")
    def by_tool(self, episode: EpisodeView) -> float:
        """Answered by the tool, without a bad or superfluous call."""
        results = [result for turn in episode.turns for result in turn.results]
        needed = len(episode.task.metadata["operators"])
        answered = episode.final_answer is not None
        in_order = all(result.ok for result in results) and 1 <= len(results) <= needed
        return float(answered and in_order)

    @reward(weight=0.5, low=0, high=1, name="format")
    def in_format(self, episode: EpisodeView) -> float:
        """The last message is the answer in its tags, and every turn thought first."""
        thought = all(turn.message.get("reasoning_content", "").strip() for turn in episode.turns)
        answer = (episode.final_answer or "").strip()
        return float(bool(_ANSWER.fullmatch(answer)) and (thought or not self.think))

    @reward(weight=0.0, low=0, high=1)
    def success(self, episode: EpisodeView) -> float:
        """Correct, by the tool, in the format."""
        return self.correct(episode) * self.by_tool(episode) * self.in_format(episode)

    def expert(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        """Do the operations one by one, then answer; see `habits` for what can go wrong."""

        def slips(habit: str) -> bool:
            return rng.random() < habits.get(habit, 0.0)

        numbers = self.task.metadata["numbers"]
        operators = self.task.metadata["operators"]
        in_words = self.task.metadata["in_words"]
        values = [result.value for turn in self.turns for result in turn.results if result.ok]
        done = min(len(values), len(operators))
        last = values[-1] if values else numbers[0]
        guesses = not self.turns and slips("guess")
        knows = not self.turns and slips("skip_tool")
        if done == len(operators) or guesses or knows or (done > 0 and slips("stop_early")):
            wrong = guesses or slips("ignore_result")
            right = self.task.answer if knows else last
            answer = _near(rng, self.task.answer) if wrong else right
            action = Action(role="assistant", content=f"<answer>{answer}</answer>")
            thought = _THINK_LAST
        else:
            action = self._call(rng, last, operators[done], numbers[done + 1], slips)
            thought = _phrase([last, numbers[done + 1]], [operators[done]], in_words)
        if self.think and not slips("no_think"):
            action["reasoning_content"] = thought
        return action

    def _call(
        self,
        rng: random.Random,
        left: int,
        symbol: str,
        right: int,
        slips: Callable[[str], bool],
    ) -> Action:
        if slips("wrong_operator"):
            symbol = rng.choice([other for other in _OPERATIONS if other != symbol])
        expr = f"{left}{symbol}{right}"
        action = Action(role="assistant", content="")
        if slips("broken_json"):
            text = json.dumps({"name": "calc", "arguments": {"expr": expr}})[:-1]
            action["invalid_tool_calls"] = [
                {
                    "text": text,
                    "error": "malformed_json",
                    "span": (0, len(text)),
                    "detail": "the call is not valid JSON",
                    "index": 0,
                }
            ]
        else:
            action["tool_calls"] = [make_call("calc", {"expr": expr}, turn=len(self.turns))]
        return action


def _phrase(numbers: list[int], operators: list[str], in_words: bool) -> str:
    """Write a sum that is worked out from left to right."""
    text = str(numbers[0])
    for position, (symbol, number) in enumerate(zip(operators, numbers[1:], strict=True)):
        if in_words:
            text += f"{', then' if position else ''} {_WORDS[symbol]} {number}"
        else:
            text = f"({text})" if position else text
            text += f" {symbol} {number}"
    return text


def _equal(digits: str, gold: int) -> bool:
    return len(digits) <= 40 and int(digits) == gold


def _near(rng: random.Random, answer: int) -> int:
    """A wrong number of about the same size."""
    span = max(10, abs(answer))
    guess = answer + rng.choice([-1, 1]) * rng.randint(1, span)
    return guess
