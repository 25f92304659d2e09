"""`Algorithm`: one frozen value for each of eight axes, checked when built and when bound.

    loss = sum_t weight[t] * mask[t] * correction[t] * surrogate[t] + regularizers

A preset is a value (`turngym.rl.presets`), a variant is `dataclasses.replace`. What
depends on the run is resolved by `Algorithm.bind`. No torch here.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal, TypeVar

from tyro.conf import Fixed

from turngym.rl.axes import (
    Aggregate,
    Conditioned,
    NegativeEntropy,
    Ratio,
    Reward,
    Selection,
    SelfCertainty,
    check_that,
)
from turngym.rl.binding import (
    RunFacts,
    bind_advantage,
    bind_aggregate,
    bind_reward,
    find_metric,
)
from turngym.rl.demands import check_groups, check_models, check_rewards
from turngym.rl.estimators import (
    GAE,
    AnchorState,
    Estimator,
    GroupAdvantage,
    Pairs,
    TurnNormalized,
)
from turngym.rl.terms import (
    KL,
    BehaviorCorrection,
    Entropy,
    KLCov,
    OffPolicySequenceMask,
    PositiveNLL,
    Regularizer,
    RoleWeight,
    TokenRule,
    ValueLoss,
)
from turngym.rl.trust_region import Clip, DivergenceMask, GeometricClip, TrustRegion

__all__ = ["Algorithm", "BoundAlgorithm", "RunFacts"]

Unit = Literal["token", "row", "group"]

R = TypeVar("R", bound=Regularizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A policy-optimization algorithm: eight axes, and where they come from.

    Raises:
        ConfigError: at construction, when axes contradict each other; the message holds the fix.
    """

    name: Annotated[str, Fixed]
    paper: Annotated[str, Fixed]
    """arXiv id, or a DOI where there is none."""

    formula: Annotated[str, Fixed]
    """The objective in one line."""

    deviations: Annotated[tuple[str, ...], Fixed] = ()
    """Where the preset differs from its paper, and why."""

    reward: Reward = field(default_factory=Reward)
    selection: Selection = field(default_factory=Selection)
    advantage: Estimator = field(default_factory=GroupAdvantage)
    ratio: Ratio = field(default_factory=Ratio)
    trust_region: TrustRegion | None = None
    tokens: tuple[TokenRule, ...] = ()
    aggregate: Aggregate = field(default_factory=Aggregate)
    regularize: tuple[Regularizer, ...] = ()

    def __post_init__(self) -> None:
        self._check_ratio()
        self._check_advantage()
        self._check_terms()

    def term(self, kind: type[R]) -> R | None:
        """Return the regularizer of a type, or None."""
        return next((term for term in self.regularize if isinstance(term, kind)), None)

    def rule(self, kind: type[TokenRule]) -> TokenRule | None:
        """Return the token rule of a type, or None."""
        return next((rule for rule in self.tokens if isinstance(rule, kind)), None)

    @property
    def aggregates(self) -> bool:
        """The loss is a weighted sum over tokens; a preference loss is a mean over pairs."""
        return not isinstance(self.advantage, Pairs)

    @property
    def needs_metric(self) -> bool:
        """Something asks which component tells right from wrong."""
        return (
            self.selection.needs_metric
            or self.term(PositiveNLL) is not None
            or any(
                isinstance(shaping, Conditioned) and shaping.on is None
                for shaping in self.reward.shaping
            )
        )

    def bind(self, run: RunFacts) -> "BoundAlgorithm":
        """Resolve what depends on the run and check that the run can feed the algorithm.

        Raises:
            ConfigError: the run lacks something; the message says what to add or to choose.
        """
        check_groups(self, run)
        check_models(self, run)
        check_rewards(self, run)
        metric = find_metric(self.selection, run)
        check_that(
            metric is not None or not self.needs_metric,
            f"{self.name} must know which reward says right or wrong; set selection.metric to one "
            f"of {sorted(run.rubric)}",
        )
        return BoundAlgorithm(
            algorithm=replace(
                self,
                reward=bind_reward(self.reward, metric, run),
                selection=replace(self.selection, metric=metric),
                advantage=bind_advantage(self.advantage, self.reward, run),
                aggregate=bind_aggregate(self.aggregate, run),
            ),
            run=run,
        )

    def _check_ratio(self) -> None:
        ratio, region = self.ratio, self.trust_region
        check_that(
            region is None or ratio.anchor != "none",
            f"{type(region).__name__} bounds a ratio; set ratio.anchor to 'old' or 'rollout'",
        )
        check_that(
            self.term(BehaviorCorrection) is None or ratio.anchor == "old",
            "BehaviorCorrection weighs old against rollout, which ratio.anchor="
            f"{ratio.anchor!r} does not leave open; drop the correction or set anchor='old'",
        )
        check_that(
            ratio.level == "token" or isinstance(region, (Clip, type(None))),
            f"ratio.level={ratio.level!r} goes with Clip or no trust region, got "
            f"{type(region).__name__}; set level='token'",
        )
        check_that(
            ratio.anchor != "rollout"
            or ratio.demo_shaping is not None
            or self.selection.demonstrations == 0,
            "demonstrations have no sampler to anchor on; set ratio.anchor='old' or demo_shaping",
        )
        check_that(
            ratio.demo_shaping is None or self.selection.demonstrations > 0,
            "ratio.demo_shaping shapes demonstrations; set selection.demonstrations to at least 1",
        )

    def _check_advantage(self) -> None:
        advantage, region = self.advantage, self.trust_region
        varies = advantage.per_token or (
            isinstance(advantage, GroupAdvantage)
            and (advantage.unit != "trajectory" or advantage.whiten == "token")
        )
        check_that(
            not (isinstance(region, GeometricClip) and varies),
            "GeometricClip takes one advantage a row; use an advantage with unit='trajectory' "
            "and whiten='none' or 'sequence'",
        )
        check_that(
            not isinstance(advantage, Pairs) or (region is None and not self.tokens),
            "Pairs bring a loss of their own; drop the trust region and the token rules",
        )
        in_groups = isinstance(advantage, GroupAdvantage)
        check_that(
            self.reward.combine == "sum" or in_groups,
            "combine='normalize_then_sum' is defined for GroupAdvantage, got "
            f"{type(advantage).__name__}; set combine='sum'",
        )
        if isinstance(advantage, GroupAdvantage) and self.reward.combine == "normalize_then_sum":
            check_that(
                advantage.scale in ("none", "group_std") and advantage.compares_members,
                "combine='normalize_then_sum' normalises in the group; use "
                "baseline='group_mean' or 'leave_one_out' and scale='group_std' or 'none', got "
                f"{advantage.baseline!r} and {advantage.scale!r}",
            )
            check_that(
                advantage.unit != "token" and advantage.virtual_rewards == 0,
                "combine='normalize_then_sum' has no token unit and no virtual rewards",
            )

    def _check_terms(self) -> None:
        kinds = [type(term) for term in (*self.regularize, *self.tokens)]
        twice = sorted({kind.__name__ for kind in kinds if kinds.count(kind) > 1})
        check_that(not twice, f"{', '.join(twice)} given twice; merge them into one")
        kl = self.term(KL)
        check_that(
            kl is None or kl.where == "loss" or self.reward.combine == "sum",
            "KL in the reward is no component to normalise; set KL.where='loss'",
        )
        check_that(
            kl is None or kl.where == "loss" or type(self.advantage) in _TAKES_KL_IN_REWARD,
            f"{type(self.advantage).__name__} takes no KL in the reward; set KL.where='loss'",
        )
        check_that(
            self.term(ValueLoss) is None or self.advantage.needs_values,
            f"ValueLoss trains a critic that {type(self.advantage).__name__} never reads; "
            "use GAE or drop it",
        )
        check_that(
            self.term(KLCov) is None or self.trust_region is None,
            "KLCov replaces the trust region; set trust_region=None",
        )
        role = self.rule(RoleWeight)
        check_that(
            not (isinstance(role, RoleWeight) and role.per == "role")
            or self.aggregate.mode == "token_mean",
            "RoleWeight(per='role') is a mean per role; set aggregate mode 'token_mean'",
        )


_TAKES_KL_IN_REWARD = (GroupAdvantage, GAE, TurnNormalized)


@dataclass(frozen=True)
class BoundAlgorithm:
    """An algorithm with nothing left open, and what it needs from the trainer."""

    algorithm: Algorithm
    """Every None and `auto` that depends on the run replaced."""

    run: RunFacts

    @cached_property
    def needs_old_logp(self) -> bool:
        """A pass with the weights that sampled is needed before the first update.

        With one optimizer step per batch, the old policy is the new one, detached.
        """
        kl = self.algorithm.term(KL)
        return (
            (self.algorithm.ratio.anchor == "old" and self.run.updates > 1)
            or self.algorithm.term(BehaviorCorrection) is not None
            or (kl is not None and kl.where == "reward")
        )

    @cached_property
    def needs_ref(self) -> bool:
        """Log-probabilities of the reference policy are needed."""
        return isinstance(self.algorithm.advantage, Pairs) or self.algorithm.term(KL) is not None

    @cached_property
    def needs_values(self) -> bool:
        """Values of the critic are needed."""
        return self.algorithm.advantage.needs_values

    @cached_property
    def needs_greedy(self) -> bool:
        """One greedy rollout per task is needed as a baseline; it never trains."""
        advantage = self.algorithm.advantage
        return isinstance(advantage, GroupAdvantage) and advantage.baseline == "greedy"

    @cached_property
    def needs_prepass(self) -> bool:
        """Detached `logp_current` (and `entropy`) over each whole optimizer batch are needed.

        The plan is then made anew before every optimizer step.
        """
        rules = self.algorithm.tokens
        return (
            any(rule.needs_prepass or rule.needs_entropy for rule in rules)
            or self.algorithm.term(KLCov) is not None
        )

    @cached_property
    def needs_batch_entropy(self) -> bool:
        """`Batch.entropy` is read: by the pre-pass of a token rule, or by an entropy reward."""
        return any(rule.needs_entropy for rule in self.algorithm.tokens) or any(
            isinstance(shaping, NegativeEntropy) for shaping in self.algorithm.reward.shaping
        )

    @cached_property
    def needs_entropy(self) -> bool:
        """The forward pass with gradient must return entropies."""
        return self.algorithm.term(Entropy) is not None

    @cached_property
    def needs_certainty(self) -> bool:
        """`Batch.certainty` is read: per-token self-certainty of the current policy."""
        return any(isinstance(shaping, SelfCertainty) for shaping in self.algorithm.reward.shaping)

    @cached_property
    def needs_anchors(self) -> bool:
        """`Batch.anchor_state` is read: the state before every turn, numbered."""
        return isinstance(self.algorithm.advantage, AnchorState)

    @cached_property
    def needs_topk(self) -> bool:
        """`Batch.topk_logp` and the current policy's log-probabilities of those ids are needed."""
        region = self.algorithm.trust_region
        return isinstance(region, DivergenceMask) and region.needs_topk

    @cached_property
    def unit(self) -> Unit:
        """What a micro-batch must hold whole: any tokens, whole rows, or whole groups."""
        algorithm, region = self.algorithm, self.algorithm.trust_region
        if isinstance(algorithm.advantage, Pairs):
            return "group"
        if (
            algorithm.ratio.level != "token"
            or (region is not None and region.needs_rows)
            or algorithm.rule(OffPolicySequenceMask) is not None
        ):
            return "row"
        return "token"

    @cached_property
    def weights(self) -> dict[str, float]:
        """Weight of every component of the rubric."""
        return {
            name: self.algorithm.reward.weights.get(name, spec.weight)
            for name, spec in self.run.rubric.items()
        }
