"""An environment of your own: write it, register it, check it, play it."""

import random
from collections.abc import Mapping

import turngym
from turngym.envs import Draft, TaskSet, make_call


@turngym.tool(timeout_s=2)
def letters(word: str) -> int:
    """Count the letters of a word."""
    return len(word)


def draw(rng: random.Random) -> Draft:
    word = "".join(rng.choices("abcdefgh", k=rng.randint(5, 15)))
    return Draft(prompt=f"How many letters has {word}?", answer=len(word), metadata={"word": word})


class Letters(turngym.TurnEnv):
    """Count letters with a tool, and say the number."""

    tools = (letters,)

    def tasks(self, split: str) -> TaskSet:
        return TaskSet.generate(draw, split=split, size=1000)

    @turngym.reward(weight=1.0, low=0, high=1)
    def correct(self, episode: turngym.EpisodeView) -> float:
        return float(episode.final_answer == str(episode.task.answer))

    def expert(self, rng: random.Random, habits: Mapping[str, float]) -> turngym.Action:
        if self.turns:
            return {"role": "assistant", "content": self.turns[-1].results[0].text}
        call = make_call("letters", {"word": self.task.metadata["word"]}, turn=0)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


turngym.register("my/Letters-v0", Letters, max_turns=4)

if __name__ == "__main__":
    turngym.check_env("my/Letters-v0")
    env = turngym.make("my/Letters-v0")
    print(env.reset(seed=0)[0][0]["content"])
    for _turn in range(2):
        step = env.step(env.get_wrapper_attr("demonstrate")(random.Random(0), {}))
    print(step[-1]["rewards"])
