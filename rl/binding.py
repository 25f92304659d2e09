"""What a run decides of an algorithm: limits, names, units, the largest return; no torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from turngym.errors import ConfigError
from turngym.rl.axes import (
    Aggregate,
    Conditioned,
    Reward,
    Selection,
    Shaping,
    SoftOverlong,
    check_that,
)
from turngym.rl.estimators import Estimator, GroupAdvantage
from turngym.types import RewardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What an algorithm must know of the run it is used in."""

    rubric: Mapping[str, RewardSpec]
    """Every reward component the environment can emit, by name."""

    group_size: int
    """Trajectories sampled per task."""

    max_tokens: int | None = None
    """Most policy tokens a trajectory may hold, all turns together."""

    updates: int = 1
    """Optimizer steps per generation batch."""

    has_reference: bool = False
    """A reference policy can be evaluated."""

    has_critic: bool = False
    """Values of the policy tokens can be computed."""

    has_entropy: bool = True
    """Entropies of the policy tokens can be computed."""

    has_task_ids: bool = True
    """Tasks can be recognised when they come again."""

    topk: int = 0
    """Most likely tokens the sampler records with each sampled one."""


def find_metric(selection: Selection, run: RunFacts) -> str | None:
    """Return the outcome component that tells right from wrong; None when it is not obvious."""
    named = selection.metric
    if named is not None:
        check_that(
            named in run.rubric,
            f"selection.metric is {named!r}, but the environment emits {sorted(run.rubric)}",
        )
        return named
    outcomes = [spec.name for spec in run.rubric.values() if spec.level == "outcome"]
    if len(outcomes) == 1:
        return outcomes[0]
    return next((name for name in ("correct", "accuracy", "success") if name in outcomes), None)


def bind_reward(reward: Reward, metric: str | None, run: RunFacts) -> Reward:
    """Fill in the limits and names that shaping leaves open."""
    shaping: list[Shaping] = []
    for item in reward.shaping:
        if isinstance(item, SoftOverlong):
            limit = item.max_tokens or run.max_tokens
            if limit is None:
                raise ConfigError(
                    "SoftOverlong needs the limit of policy tokens; set its max_tokens"
                )
            cache = item.cache_tokens if item.cache_tokens is not None else max(1, limit // 5)
            shaping.append(replace(item, max_tokens=limit, cache_tokens=cache))
        elif isinstance(item, Conditioned):
            on = item.on or metric
            names = [name for name in (on, *item.components) if name not in run.rubric]
            check_that(
                not names,
                f"Conditioned names {names}, but the environment emits {sorted(run.rubric)}",
            )
            others = item.components or tuple(name for name in run.rubric if name != on)
            shaping.append(replace(item, on=on, components=others))
        else:
            shaping.append(item)
    return replace(reward, shaping=tuple(shaping))


def bind_advantage(advantage: Estimator, reward: Reward, run: RunFacts) -> Estimator:
    """Decide the unit and the largest possible return."""
    if not isinstance(advantage, GroupAdvantage):
        return advantage
    unit = advantage.unit
    if unit == "auto":
        whole = advantage.virtual_rewards > 0 or advantage.scale == "group_mean"
        has_turn_rewards = any(spec.level == "turn" for spec in run.rubric.values())
        unit = "turn" if has_turn_rewards and not whole else "trajectory"
    best = advantage.max_return
    if advantage.virtual_rewards and best is None:
        best = _largest_return(reward, run)
    return replace(advantage, unit=unit, max_return=best)


def _largest_return(reward: Reward, run: RunFacts) -> float:
    """Sum of what every component can add at best."""
    best, open_ended = 0.0, []
    for name, spec in run.rubric.items():
        weight = reward.weights.get(name, spec.weight)
        bound = spec.high if weight > 0 else spec.low
        if weight == 0:
            continue
        if bound is None or spec.level == "turn":
            open_ended.append(name)
        else:
            best += weight * bound
    check_that(
        not open_ended,
        f"the largest possible return is unknown ({open_ended} have no bound per episode); "
        "set advantage.max_return",
    )
    return best


def bind_aggregate(aggregate: Aggregate, run: RunFacts) -> Aggregate:
    """Fill in the constant L."""
    if aggregate.mode != "seq_mean_token_sum_norm" or aggregate.length is not None:
        return aggregate
    if run.max_tokens is None:
        raise ConfigError(
            "aggregate 'seq_mean_token_sum_norm' divides by a constant; set aggregate.length, or "
            "limit the policy tokens of a trajectory"
        )
    return replace(aggregate, length=run.max_tokens)
