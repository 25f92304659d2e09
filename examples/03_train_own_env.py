"""From a function to a better agent: register an environment, check it, evaluate, train."""

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import turngym
from turngym import agents
from turngym.envs import Draft, TaskSet, make_call
from turngym.rl import SftConfig, TrainConfig, train


@turngym.tool
def double(number: int) -> int:
    """Double a whole number."""
    return 2 * number


def draw(rng: random.Random) -> Draft:
    number = rng.randint(1, 999)
    return Draft(prompt=f"double {number}", answer=2 * number, metadata={"number": number})


class Double(turngym.TurnEnv):
    """Double a number with a tool, and say the result."""

    tools = (double,)

    def tasks(self, split: str) -> TaskSet:
        return TaskSet.generate(draw, split=split, size=500)

    @turngym.reward(low=0, high=1)
    def correct(self, episode: turngym.EpisodeView) -> float:
        return float(episode.final_answer == str(episode.task.answer))

    def expert(self, rng: random.Random, habits: Mapping[str, float]) -> turngym.Action:
        if self.turns:
            return {"role": "assistant", "content": self.turns[-1].results[0].text}
        calls = [make_call("double", {"number": self.task.metadata["number"]}, turn=0)]
        return {"role": "assistant", "content": "", "tool_calls": calls}


turngym.register("my/Double-v0", Double, max_turns=3)

if __name__ == "__main__":
    turngym.check_env("my/Double-v0")
    source = agents.EnvSource("my/Double-v0", split="eval")
    oracle = agents.MessageAgent.factory(agents.OraclePolicy())
    with agents.RolloutEngine(source, oracle, seed=0) as engine:
        print("oracle:", agents.evaluate(engine, num_tasks=50).pass_at[1].value)
    config = TrainConfig(
        env_id="my/Double-v0",
        run=Path(tempfile.mkdtemp()) / "run",
        steps=3,
        sft=SftConfig(steps=40, demos=200),
        rollout=agents.RolloutConfig(group_size=4, max_tokens=32),
    )
    print("trained model:", train(config))
