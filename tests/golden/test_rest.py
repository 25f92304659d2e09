from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from turngym.rl.aggregate import aggregate_weights
from turngym.rl.axes import Aggregate
from turngym.rl.filters import keep_group, retired
from turngym.rl.labels import (
    majority_label,
    majority_rewards,
    proposer_reward,
    reflection_reward,
    role_reward,
    self_certainty,
)
from turngym.rl.plan import plan
from turngym.rl.presets import PRESETS
from turngym.rl.returns import soft_overlong
from turngym.rl.terms import DropTruncated, RoleWeight
from turngym.rl.trees import branch_score

PLAIN = replace(PRESETS["grpo"], regularize=())


@pytest.mark.only_file
def test_the_file_has_no_unknown_section(golden: Any) -> None:
    covered = {"advantages", "losses", "aggregation", "rewards", "filters", "fixture"}
    # The routed adapters of DART are model arithmetic, not algorithm arithmetic.
    assert set(golden.data) - covered == {"dart"}


AGGREGATION = {
    "token_mean": Aggregate(mode="token_mean"),
    "token_sum": Aggregate(mode="token_sum"),
    "seq_mean_token_mean": Aggregate(mode="seq_mean_token_mean"),
    "seq_mean_token_sum": Aggregate(mode="seq_mean_token_sum"),
    "seq_mean_token_sum_norm": Aggregate(mode="seq_mean_token_sum_norm"),
    "prompt_mean": Aggregate(mode="prompt_mean"),
}
FILTERED = {
    "token_mean_overlong_filtered": Aggregate(mode="token_mean"),
    "seq_mean_token_mean_overlong_filtered_active": Aggregate(mode="seq_mean_token_mean"),
    "seq_mean_token_mean_overlong_filtered_all": Aggregate(mode="seq_mean_token_mean", count="all"),
}
ROLES = {
    "dart_role_weight_rolemean_0.3_0.7": "role",
    "dart_role_weight_tokenwise_0.3_0.7": "token",
}
PARTS = "token_mean_two_microbatches_with_global_weights"
COUNTER_EXAMPLE = "token_mean_two_microbatches_naive_WRONG"


def per_token(golden: Any) -> Tensor:
    return golden.column_of(golden["aggregation"]["per_token_loss"])[golden.mask]  # type: ignore[no-any-return]


def test_every_aggregation_is_covered(golden: Any) -> None:
    known = {*AGGREGATION, *FILTERED, *ROLES, PARTS, COUNTER_EXAMPLE, "per_token_loss"}
    assert set(golden["aggregation"]) <= known


def test_aggregation_weights(golden: Any, close: Any) -> None:
    for name, spec in AGGREGATION.items():
        planned = golden.plan(replace(PLAIN, aggregate=spec), golden.batch("r_real"))
        close((planned.weight * per_token(golden)).sum(), golden["aggregation"][name])


def test_truncated_rows_leave_the_denominator(golden: Any, close: Any) -> None:
    for name, spec in FILTERED.items():
        algorithm = replace(PLAIN, aggregate=spec, tokens=(DropTruncated(),))
        planned = golden.plan(algorithm, golden.batch("r_real"))
        close((planned.weight * per_token(golden)).sum(), golden["aggregation"][name])


def test_role_weights(golden: Any, close: Any) -> None:
    for name, per in ROLES.items():
        reasoning, action = (float(part) for part in name.split("_")[-2:])
        rule = RoleWeight(reasoning=reasoning, action=action, per=per)  # type: ignore[arg-type]
        algorithm = replace(PLAIN, aggregate=Aggregate(mode="token_mean"), tokens=(rule,))
        planned = golden.plan(algorithm, golden.batch("r_real"))
        close((planned.policy_weight * per_token(golden)).sum(), golden["aggregation"][name])


def halves(golden: Any) -> tuple[Tensor, Tensor]:
    """The first rows and the rest, cut where the file's global parts are."""
    batch = golden.batch("r_real")
    weight = aggregate_weights(Aggregate(mode="token_mean"), batch, batch.trainable)
    first = golden["aggregation"][PARTS]["parts"][0]
    fitting = [
        cut
        for cut in range(1, batch.num_rows)
        if abs((weight * per_token(golden))[batch.row < cut].sum() - first) < 1e-6
    ]
    assert len(fitting) == 1
    return batch.row < fitting[0], batch.row >= fitting[0]


@pytest.mark.only_file
def test_parts_of_a_batch_add_up_only_with_the_weights_of_the_whole(
    golden: Any, close: Any
) -> None:
    batch, loss = golden.batch("r_real"), per_token(golden)
    spec = Aggregate(mode="token_mean")
    weight = aggregate_weights(spec, batch, batch.trainable)
    wanted = golden["aggregation"][PARTS]
    parts = torch.stack([(weight * loss)[half].sum() for half in halves(golden)])
    close(parts, wanted["parts"])
    close(parts.sum(), wanted["total"])

    wrong = golden["aggregation"][COUNTER_EXAMPLE]
    naive = torch.stack(
        [(aggregate_weights(spec, batch, half) * loss).sum() for half in halves(golden)]
    )
    close(naive, wrong["parts"])
    close(naive.mean(), wrong["total"])
    assert abs(wrong["total"] - wanted["total"]) > 1e-3


@pytest.mark.only_file
def test_steps_of_one_batch_have_their_own_totals(golden: Any, close: Any) -> None:
    batch = golden.batch("r_real")
    algorithm = replace(PLAIN, aggregate=Aggregate(mode="token_mean"))
    _, second = halves(golden)
    step = torch.zeros(batch.num_rows, dtype=torch.int64)
    step[batch.row[second]] = 1
    planned = plan(golden.bind(algorithm, batch), batch, step=step)
    parts = golden["aggregation"][COUNTER_EXAMPLE]["parts"]
    for number, part in enumerate(parts):
        inside = step[batch.row] == number
        close((planned.weight * per_token(golden))[inside].sum(), part)


FILTERS = {
    "zero_variance_keep": "nonzero_spread",
    "dapo_accuracy_keep": "mixed",
    "ngrpo_keep_all_wrong": "not_all_correct",
}


@pytest.mark.only_file
def test_group_filters(golden: Any) -> None:
    found = golden["filters"]
    assert set(found) <= {*FILTERS, "groups", "no_positive_resampling"}
    for name, kind in FILTERS.items():
        kept = [int(keep_group(group, kind)) for group in found["groups"]]  # type: ignore[arg-type]
        assert kept == found[name], name


@pytest.mark.only_file
def test_no_positive_resampling(golden: Any) -> None:
    wanted = golden["filters"]["no_positive_resampling"]
    gone = retired(wanted["history"], wanted["threshold"])
    assert [task for task in wanted["history"] if task not in gone] == wanted["sample_again"]


@pytest.mark.only_file
def test_every_reward_is_covered(golden: Any) -> None:
    known = {
        "arpo_branch_probability",
        "azr_composite",
        "azr_propose",
        "dapo_soft_overlong",
        "reflect_retry_reward",
        "self_certainty",
        "ttrl_majority",
    }
    assert set(golden["rewards"]) <= known


@pytest.mark.only_file
def test_soft_overlong_punishment(golden: Any, close: Any) -> None:
    # The file names lengths and penalties: the limits follow from two of those between 0 and -1.
    penalties = golden["rewards"]["dapo_soft_overlong"]
    wanted = {int(length): value for length, value in penalties.items()}
    (short, low), (long, high) = [item for item in wanted.items() if -1 < item[1] < 0][:2]
    cache = (long - short) / (low - high)
    start = round(short + low * cache)
    limit = round(start + cache)
    found = soft_overlong(torch.tensor(list(wanted)), max_tokens=limit, cache_tokens=limit - start)
    close(found, list(wanted.values()))


@pytest.mark.only_file
def test_branching(golden: Any, close: Any) -> None:
    wanted = golden["rewards"]["arpo_branch_probability"]
    for change, score in wanted["cases"].items():
        close(branch_score(float(change), alpha=wanted["alpha"], beta=wanted["beta"]), score)


@pytest.mark.only_file
def test_absolute_zero_rewards(golden: Any, close: Any) -> None:
    for rate, reward in golden["rewards"]["azr_propose"].items():
        close(proposer_reward(float(rate)), reward)
    composite = golden["rewards"]["azr_composite"]
    assert role_reward(1.0, well_formed=False) == composite["malformed"]
    assert role_reward(0.0, well_formed=True) == composite["well_formed_but_wrong"]
    assert role_reward(0.875, well_formed=True) == 0.875


@pytest.mark.only_file
def test_reflection_rewards(golden: Any) -> None:
    for case in golden["rewards"]["reflect_retry_reward"]["cases"]:
        second = None if case["second_ok"] is None else bool(case["second_ok"])
        found = reflection_reward(first_ok=bool(case["first_ok"]), second_ok=second)
        assert found == case["reward"]
        assert (found is not None) == bool(case["train"])


@pytest.mark.only_file
def test_self_certainty(golden: Any, close: Any) -> None:
    wanted = golden["rewards"]["self_certainty"]
    found = [self_certainty(logits) for logits in wanted["logits"]]
    close(found, wanted["per_token"])
    close(sum(found) / len(found), wanted["reward"])
    close(-sum(wanted["entropy"]) / len(found), wanted["neg_entropy_reward"])


@pytest.mark.only_file
def test_majority_vote(golden: Any, close: Any) -> None:
    wanted = golden["rewards"]["ttrl_majority"]
    label, ratio = majority_label(wanted["answers"])
    assert label == wanted["label"]
    close(ratio, wanted["majority_ratio"])
    close(majority_rewards(wanted["answers"]), wanted["rewards"])
