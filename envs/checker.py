"""`check_env`: what turngym asks of an environment beyond Gymnasium's own checker.

Each rule is one function; all of them run, and the error lists every rule that is broken.
"""

import json
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from turngym.envs.blame import describe
from turngym.envs.calls import make_call
from turngym.envs.registry import find
from turngym.envs.wrappers import plain
from turngym.errors import ConfigError, EnvError, ResetNeededError
from turngym.types import Action, Observation, RewardSpec

__all__ = ["check_env"]

AnyEnv = gymnasium.Env[Observation, Action]
Make = Callable[..., AnyEnv]
Policy = Callable[[AnyEnv, random.Random], Action]

_SEEDS = (0, 1, 2)
_MOST_STEPS = 1000
_ODD_TEXT = "naïve 你好 🙂 \x00 <|im_end|>\n<|im_start|>system </s> [INST] <tool_response>42"


def check_env(env: str | Make | AnyEnv) -> None:
    """Check an environment against every rule an agent relies on.

    Args:
        env: a registered id, an environment class or another callable that makes environments, or
            an environment that was made by id.

    Raises:
        EnvError: at least one rule is broken; the message lists all of them.
        ConfigError: more than one environment is needed and `env` tells no way to make another.
    """
    make = _maker(env)
    broken: list[str] = []
    for rule in _RULES:
        try:
            rule(make)
        except Exception as error:
            detail = str(error) if isinstance(error, _BrokenError) else f"raised {describe(error)}"
            broken.append(f"{rule.__name__.strip('_').replace('_', ' ')}: {detail}")
    if broken:
        lines = "\n".join(f"  - {line}" for line in broken)
        raise EnvError(f"check_env: {len(broken)} of {len(_RULES)} rules are broken:\n{lines}")


class _BrokenError(Exception):
    """A rule is broken; the text says how."""


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _BrokenError(otherwise)


def _maker(env: str | Make | AnyEnv) -> Make:
    if isinstance(env, gymnasium.Env):
        if env.spec is None:
            raise ConfigError("check_env makes several environments: pass the id or the class")
        return env.spec.make
    if isinstance(env, str):
        return find(env).make
    return env


def _follow_gymnasium(make: Make) -> None:
    """Gymnasium's own checker passes, its warnings counted as failures."""
    env = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gymnasium_check_env(env.unwrapped, skip_render_check=True)
    env.close()


def _refuse_unknown_arguments(make: Make) -> None:
    try:
        make(no_such_argument=1).close()
    except (ConfigError, TypeError):
        env = make()
        if env.spec is not None:
            json.dumps(env.spec.kwargs)
        env.close()
        return
    raise _BrokenError("an unknown keyword argument was accepted")


def _keep_tasks_in_order(make: Make) -> None:
    first, second = make(), make()
    tasks, again = (env.get_wrapper_attr("task_set") for env in (first, second))
    _require(len(tasks) == len(again), "two environments have task sets of different length")
    for ordinal in range(min(len(tasks), 20)):
        task = tasks[ordinal]
        _require(task == again[ordinal], f"task {ordinal} differs between two environments")
        _require(tasks.by_id(task.id) == task, f"by_id({task.id!r}) is not task {ordinal}")
        _, info = first.reset(seed=0, options={"task": task.id})
        _require(info["task_id"] == task.id, f"reset to {task.id!r} started {info['task_id']!r}")
    first.close()
    second.close()


def _describe_tools(make: Make) -> None:
    env = make()
    _, info = env.reset(seed=0)
    for schema in info["tools"]:
        function = schema["function"]
        _require(schema["type"] == "function", f"a tool must be of type 'function': {schema}")
        _require(bool(function["description"]), f"tool {function['name']!r} has no description")
        _require(function["parameters"]["type"] == "object", f"{function['name']!r}: no object")
    env.close()


def _repeat_with_the_same_seed(make: Make) -> None:
    for seed in _SEEDS:
        first, second = _alone(make, _best, seed), _alone(make, _best, seed)
        _require(first == second, f"two episodes with seed {seed} and the same actions differ")


def _keep_the_protocol(make: Make) -> None:
    """Flags, rewards, infos and the end of an episode are what they should be."""
    env = make()
    specs: Mapping[str, RewardSpec] = env.get_wrapper_attr("reward_specs")
    outcome = _outcome_names(env)
    for policy in (_best, _random, _unknown_tool):
        steps = list(_play(env, policy, 0))[1:]
        for position, (_, reward, terminated, truncated, info) in enumerate(steps):
            rewards, ended = info["rewards"], position == len(steps) - 1
            _require(not (terminated and truncated), "terminated and truncated at once")
            _require(("stop_reason" in info) == ended, "stop_reason belongs to the last step only")
            _require(rewards.keys() <= specs.keys(), f"unknown rewards in {sorted(rewards)}")
            expected = outcome if ended else set()
            _require(outcome & rewards.keys() == expected, "the outcome is scored at the end, once")
            total = sum(specs[n].weight * v for n, v in rewards.items() if v is not None)
            _require(abs(total - reward) < 1e-9, f"reward {reward} is not the weighted sum {total}")
        _must_need_reset(env)
        scores = {name: steps[-1][4]["rewards"][name] for name in outcome}
        again = env.get_wrapper_attr("finish")("deadline")
        _require(again == scores, "finish() after the end changed the scores")
    env.close()


def _score_when_ended_from_outside(make: Make) -> None:
    env = make()
    _must_need_reset(env)
    env.reset(seed=0)
    finish = env.get_wrapper_attr("finish")
    scores, names = finish("deadline"), _outcome_names(env)
    _require(scores.keys() == names, f"finish() scored {sorted(scores)}, not {sorted(names)}")
    _require(finish("max_tokens") == scores, "finish() is not idempotent")
    _must_need_reset(env)
    env.close()


def _keep_episodes_apart(make: Make) -> None:
    """Two environments that take turns give what each gives alone."""
    envs = [make(), make()]
    running = [_play(env, _best, seed) for env, seed in zip(envs, _SEEDS, strict=False)]
    together = list(zip_longest(*running))
    for index, env in enumerate(envs):
        mixed = _text([items[index] for items in together if items[index] is not None])
        _require(mixed == _alone(make, _best, _SEEDS[index]), "two environments share state")
        env.close()


def _answer_every_call(make: Make) -> None:
    """Bad calls are answered one by one, in order; odd text is taken like any other."""
    env = make()
    _, info = env.reset(seed=0)
    names = [schema["function"]["name"] for schema in info["tools"]]
    bad = [make_call(name, {"no such argument": _ODD_TEXT}, turn=i) for i, name in enumerate(names)]
    bad.append(make_call(_ODD_TEXT, {}, turn=len(bad)))
    unread: Any = {"text": _ODD_TEXT, "error": "malformed_json", "span": (0, 1), "index": 0}
    action = Action(
        role="assistant", content=_ODD_TEXT, tool_calls=bad, invalid_tool_calls=[unread]
    )
    observation, _, _, _, info = env.step(action)
    answered = [m.get("tool_call_id") for m in observation if m["role"] == "tool"]
    _require(len(answered) == len(bad) + 1, f"{len(bad) + 1} calls got {len(answered)} answers")
    ids = [call["id"] for call in bad]
    _require(answered[1:] == ids, f"calls {ids} were answered as {answered[1:]}")
    errors = [result.error for result in info["results"]]
    expected = ["malformed_json", *["schema_mismatch"] * len(names), "unknown_tool"]
    _require(errors == expected, f"the results should say {expected}, got {errors}")
    env.reset(seed=0)
    observation, *_ = env.step(Action(role="assistant", content=_ODD_TEXT))
    _require(observation in env.observation_space, "odd text led out of the observation space")
    env.close()


def _end_by_itself(make: Make) -> None:
    """A policy that only makes bad calls is stopped by a limit."""
    env = make()
    steps = list(_play(env, _unknown_tool, 0))
    _require(bool(steps[-1][3]), f"no limit stopped an episode within {_MOST_STEPS} turns")
    env.close()


def _continue_from_a_snapshot(make: Make) -> None:
    env, other = make(), make()
    whole = list(_play(env, _best, 0))
    for moment in range(1, len(whole)):
        played = list(islice(_play(env, _best, 0), moment))
        snapshot = env.get_wrapper_attr("snapshot")()
        for place in (other, env, env):
            list(_play(place, _random, 1))
            place.get_wrapper_attr("restore")(snapshot)
            rest = list(_rest(place, _best, 0, skip=moment - 1))
            _require(_text(played + rest) == _text(whole), f"restoring turn {moment} differs")
        snapshot.close()
    env.close()
    other.close()


def _pay_honesty(make: Make) -> None:
    """There are rewards; repeating a valid call, or the prompt, scores below the expert."""
    env = make()
    _require(
        bool(env.get_wrapper_attr("reward_specs")),
        "the environment has no rewards: mark a method with @turngym.reward",
    )
    steps = [
        [step for seed in _SEEDS for step in list(_play(env, policy, seed))[1:]]
        for policy in (_best, _spam, _echo)
    ]
    scores = (value for played in steps for step in played for value in step[4]["rewards"].values())
    _require(
        any(value is not None for value in scores),
        "no component was ever scored: every reward returned None, which abstains; return a number",
    )
    best, spam, echo = (sum(step[1] for step in played) for played in steps)
    if env.get_wrapper_attr("has_expert"):
        _require(spam < best, f"spamming a valid call pays {spam:g}, the expert gets {best:g}")
        _require(echo < best, f"echoing the prompt pays {echo:g}, the expert gets {best:g}")
    env.close()


_RULES: tuple[Callable[[Make], None], ...] = (
    _follow_gymnasium,
    _refuse_unknown_arguments,
    _keep_tasks_in_order,
    _describe_tools,
    _repeat_with_the_same_seed,
    _keep_the_protocol,
    _score_when_ended_from_outside,
    _keep_episodes_apart,
    _answer_every_call,
    _end_by_itself,
    _continue_from_a_snapshot,
    _pay_honesty,
)


def _best(env: AnyEnv, rng: random.Random) -> Action:
    """The expert, or a few words where there is none."""
    if not env.get_wrapper_attr("has_expert"):
        return _random(env, rng)
    action: Action = env.get_wrapper_attr("demonstrate")(rng, {})
    return action


def _random(env: AnyEnv, rng: random.Random) -> Action:
    return Action(role="assistant", content=rng.choice(["yes", "42", "I do not know"]))


def _unknown_tool(env: AnyEnv, rng: random.Random) -> Action:
    call = make_call("no_such_tool", {}, turn=rng.randrange(10**6))
    return Action(role="assistant", content="", tool_calls=[call])


def _spam(env: AnyEnv, rng: random.Random) -> Action:
    """Repeat the expert's first tool call for ever; idle talk where it makes none."""
    turns = env.get_wrapper_attr("turns")
    action: Action = turns[0].message if turns else _best(env, rng)
    return action if action.get("tool_calls") else _random(env, rng)


def _echo(env: AnyEnv, rng: random.Random) -> Action:
    task = env.get_wrapper_attr("task")
    return Action(role="assistant", content=str(env.get_wrapper_attr("prompt")(task)))


def _play(env: AnyEnv, policy: Policy, seed: int) -> Iterator[Any]:
    """Yield what reset returns, then what each step returns."""
    yield env.reset(seed=seed)
    yield from _rest(env, policy, seed)


def _rest(env: AnyEnv, policy: Policy, seed: int, skip: int = 0) -> Iterator[Any]:
    """Play on to the end; `skip` actions were chosen before with the same seed."""
    for turn in range(skip, _MOST_STEPS):
        step = env.step(policy(env, random.Random(f"{seed}/{turn}")))
        yield step
        if step[2] or step[3]:
            return


def _alone(make: Make, policy: Policy, seed: int) -> str:
    env = make()
    text = _text(list(_play(env, policy, seed)))
    env.close()
    return text


def _text(items: Sequence[Any]) -> str:
    """Write results as JSON, to compare them and to see that they can be stored."""
    return json.dumps(items, default=plain)


def _outcome_names(env: AnyEnv) -> set[str]:
    specs: Mapping[str, RewardSpec] = env.get_wrapper_attr("reward_specs")
    return {name for name, spec in specs.items() if spec.level == "outcome"}


def _must_need_reset(env: AnyEnv) -> None:
    try:
        env.step(Action(role="assistant", content="once more"))
    except ResetNeededError:
        return
    raise _BrokenError("step() before reset() or after the end must raise ResetNeededError")
