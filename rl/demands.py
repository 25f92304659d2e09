"""What an algorithm demands of a run, with the fix in the message; no torch here."""

from typing import TYPE_CHECKING

from turngym.rl.axes import AdaptiveK, TopK, check_that
from turngym.rl.binding import RunFacts
from turngym.rl.estimators import GroupAdvantage, PassAtK
from turngym.rl.terms import KL
from turngym.rl.trust_region import DivergenceMask

if TYPE_CHECKING:
    from turngym.rl.algorithm import Algorithm


def check_groups(algorithm: "Algorithm", run: RunFacts) -> None:
    """The run samples groups that the algorithm can compare and choose from."""
    name, advantage, selection = algorithm.name, algorithm.advantage, algorithm.selection
    members = run.group_size + selection.replay + selection.demonstrations
    check_that(
        not advantage.compares_groups or members >= 2,
        f"{name} compares the members of a group, got group_size={run.group_size}; sample at "
        "least 2, or use an algorithm for single trajectories, such as 'reinforce_pp'",
    )
    if isinstance(advantage, PassAtK):
        check_that(
            advantage.k + (advantage.method == "sloo") <= members,
            f"{name} asks for pass@{advantage.k} of groups of {members}; lower advantage.k or "
            "sample more",
        )
    kept = selection.keep_in_group
    most = kept.k if isinstance(kept, TopK) else max(kept.ks) if isinstance(kept, AdaptiveK) else 0
    check_that(
        most < members,
        f"{name} keeps {most} of {members} members, which drops none; lower "
        "selection.keep_in_group or sample more",
    )
    check_that(
        run.has_task_ids or selection.retire_pass_rate is None,
        f"{name} retires tasks by pass rate and needs task ids; set "
        "selection.retire_pass_rate=None",
    )


def check_models(algorithm: "Algorithm", run: RunFacts) -> None:
    """The run can compute the columns that the algorithm reads."""
    name, region = algorithm.name, algorithm.trust_region
    check_that(
        run.has_reference or (algorithm.aggregates and algorithm.term(KL) is None),
        f"{name} needs a reference policy; keep one (reference=true), or drop KL from regularize",
    )
    check_that(
        run.has_critic or not algorithm.advantage.needs_values,
        f"{name} needs a critic; add one, or use a critic-free algorithm such as 'grpo'",
    )
    check_that(
        run.has_entropy or not any(rule.needs_entropy for rule in algorithm.tokens),
        f"{name} selects tokens by entropy, which this run does not compute",
    )
    check_that(
        run.topk > 0 or not (isinstance(region, DivergenceMask) and region.needs_topk),
        f"{name} compares the sampler's most likely tokens; record them (topk >= 1) or use "
        "measure='tv'",
    )


def check_rewards(algorithm: "Algorithm", run: RunFacts) -> None:
    """The environment's rewards suit the algorithm."""
    unknown = sorted(set(algorithm.reward.weights) - set(run.rubric))
    check_that(
        not unknown,
        f"reward.weights names {unknown}, which the environment does not emit; it emits "
        f"{sorted(run.rubric)}",
    )
    advantage, kept = algorithm.advantage, algorithm.selection.keep_in_group
    low = {spec.name: spec.low for spec in run.rubric.values() if (spec.low or 0.0) < 0}
    divides = isinstance(advantage, GroupAdvantage) and advantage.scale == "group_mean"
    check_that(
        not (divides and low),
        f"{algorithm.name} divides by the mean return and needs rewards in [0, 1]; {low} can be "
        "negative",
    )
    check_that(
        getattr(kept, "metric", None) != "token_efficiency" or not low,
        f"token_efficiency ranks long negative rows first; shift the rewards {low} to be >= 0",
    )
