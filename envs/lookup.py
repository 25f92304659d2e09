"""`turngym/Lookup-v0`: follow a chain of keys through a store, one lookup a turn.

    Start at the key qok. Look it up, look up what you get, and so on, 3 times. Where do you end?
    get {"key": "qok"} -> vab    get {"key": "vab"} -> mix    get {"key": "mix"} -> tuf
    <answer>tuf</answer>

Rewards:
    progress (turn, 0.5)     1 for a turn that gets one link further, -0.5 for any other turn with
                             calls (invalid, repeated, off the chain), 0 for a turn without calls
    correct  (outcome, 1.0)  the only answer given is the end of the chain

A turn reward pays progress, never validity: calls that are merely valid would be farmed.
"""

import random
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from turngym.envs.calls import make_call
from turngym.envs.core import TurnEnv
from turngym.envs.tasks import Draft, TaskSet
from turngym.envs.tools import tool
from turngym.errors import ConfigError, ToolError
from turngym.rewards.base import EpisodeView, TurnView, reward
from turngym.types import Action, Message, Task

__all__ = ["Lookup"]

_CONSONANTS, _VOWELS = "bcdfgklmnprstvz", "aeiou"
_DISTRACTORS = 6
_INSTRUCTIONS = "Look keys up with the tool get. Then answer with <answer>key</answer>."
_ANSWER = re.compile(r"<answer>\s*([a-z]{3})\s*</answer>")


class Lookup(TurnEnv):
    """Find the end of a chain of keys with one lookup a turn."""

    habits = ("stop_early", "wrong_key")

    def __init__(
        self,
        *,
        min_hops: int = 2,
        max_hops: int = 4,
        instructions: bool = False,
        size: int = 100_000,
        seed: int = 0,
        split: str = "train",
        max_turns: int = 8,
        parse_limit: int | None = 3,
    ) -> None:
        """Choose the chains.

        Args:
            min_hops: fewest lookups a task needs.
            max_hops: most lookups a task needs.
            instructions: explain the format in a system message, for models that were not taught
                it by demonstrations.
            size: number of tasks of the split.
            seed: another seed gives other tasks of the same split.
            split: `train`, `eval` or `test`; no task is in two of them.
            max_turns: actions after which the episode is truncated.
            parse_limit: consecutive unreadable actions after which it is truncated.
        """
        super().__init__(split=split, max_turns=max_turns, parse_limit=parse_limit)
        if not 1 <= min_hops <= max_hops <= 20:
            raise ConfigError(
                f"hops must satisfy 1 <= min_hops <= max_hops <= 20, got {min_hops} and {max_hops}"
            )
        self.min_hops, self.max_hops = min_hops, max_hops
        self.instructions = instructions
        self.size, self.seed = size, seed

    def tasks(self, split: str) -> TaskSet:
        """Return generated chains; the metadata holds the chain and the store."""
        return TaskSet.generate(self._draw, split=split, size=self.size, seed=self.seed)

    def prompt(self, task: Task) -> Sequence[Message]:
        """Ask the question, after the instructions where they are wanted."""
        question: Message = {"role": "user", "content": str(task.prompt)}
        system: Message = {"role": "system", "content": _INSTRUCTIONS}
        return (system, question) if self.instructions else (question,)

    def _draw(self, rng: random.Random) -> Draft:
        hops = rng.randint(self.min_hops, self.max_hops)
        names: dict[str, None] = {}
        while len(names) < hops + 1 + 2 * _DISTRACTORS:
            syllable = rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + rng.choice(_CONSONANTS)
            names[syllable] = None
        chain, others = list(names)[: hops + 1], list(names)[hops + 1 :]
        store = dict(pairwise(chain))
        store |= dict(zip(others[::2], others[1::2], strict=True))
        return Draft(
            prompt=(
                f"Start at the key {chain[0]}. Look it up, look up what you get, and so on, "
                f"{hops} times. Where do you end?"
            ),
            answer=chain[-1],
            metadata={"chain": chain, "store": store},
            key=" ".join(chain),
        )

    @tool(timeout_s=2)
    def get(self, key: str) -> str:
        """Return the value that the store holds under a key.

        Args:
            key: three letters
        """
        store: Mapping[str, str] = self.task.metadata["store"]
        if key not in store:
            raise ToolError(f"no key {key[:40]!r} in the store")
        return store[key]

    def _reached(self, turns: Sequence[TurnView]) -> int:
        """Links of the chain that were followed, each after the one before."""
        chain: list[str] = self.task.metadata["chain"]
        reached = 0
        for result in (result for turn in turns for result in turn.results):
            on_chain = reached < len(chain) - 1 and result.arguments.get("key") == chain[reached]
            reached += result.ok and on_chain
        return reached

    @reward(weight=0.5, on="turn", low=-0.5, high=1)
    def progress(self, turn: TurnView) -> float:
        """Pay a turn that got one link further; any other turn with calls costs."""
        if not turn.results:
            return 0.0
        before = self._reached(self.turns[: turn.index])
        after = self._reached(self.turns[: turn.index + 1])
        return 1.0 if after - before == len(turn.results) else -0.5

    @reward(weight=1.0, low=0, high=1)
    def correct(self, episode: EpisodeView) -> float:
        """The only answer given is the end of the chain."""
        answers = _ANSWER.findall(episode.final_answer or "")
        return float(answers == [episode.task.answer])

    def expert(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        """Follow the chain, then answer; `stop_early` answers on the way, `wrong_key` strays."""
        chain: list[str] = list(self.task.metadata["chain"])
        reached = self._reached(self.turns)
        stops = reached > 0 and rng.random() < habits.get("stop_early", 0.0)
        if reached == len(chain) - 1 or stops:
            return Action(
                role="assistant",
                content=f"<answer>{chain[reached]}</answer>",
                reasoning_content="so the answer is",
            )
        key = chain[reached]
        if rng.random() < habits.get("wrong_key", 0.0):
            key = rng.choice([other for other in self.task.metadata["store"] if other != key])
        return Action(
            role="assistant",
            content="",
            reasoning_content=f"look up {key}",
            tool_calls=[make_call("get", {"key": key}, turn=len(self.turns))],
        )
