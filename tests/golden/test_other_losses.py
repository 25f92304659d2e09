import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from turngym.rl.axes import Ratio
from turngym.rl.divergence import topk_divergence
from turngym.rl.estimators import GAE, GroupAdvantage, Pairs
from turngym.rl.objectives import objective, value_objective
from turngym.rl.padded import flatten, unflatten
from turngym.rl.presets import PRESETS
from turngym.rl.regularizers import kl_penalty
from turngym.rl.surrogates import Tokens, surrogate
from turngym.rl.terms import Entropy, ValueLoss
from turngym.rl.trust_region import DivergenceMask

NUMBER = r"([\d.]+)"


def entries(golden: Any, pattern: str) -> list[tuple[re.Match[str], Any]]:
    matches = [(re.fullmatch(pattern, key), value) for key, value in golden["losses"].items()]
    found = [(match, value) for match, value in matches if match]
    assert found, f"no key matches {pattern}"
    return found


def test_dpo_pairs_loss_and_gradient(golden: Any, close: Any) -> None:
    for match, wanted in entries(golden, f"dpo_beta{NUMBER}_best_worst"):
        algorithm = replace(PRESETS["dpo"], advantage=Pairs(beta=float(match[1])))
        batch = golden.batch("r_real")
        planned = golden.plan(algorithm, batch)
        assert planned.pairs is not None
        assert planned.pairs.tolist() == wanted["pairs"]
        loss, gradient = golden.loss(algorithm, batch)
        close(loss, wanted["loss"])
        close(gradient, wanted["grad"])


def test_dpo_margins_sum_policy_tokens_only(golden: Any, close: Any) -> None:
    for _, wanted in entries(golden, f"dpo_beta{NUMBER}_best_worst"):
        new = (golden.column("logp_new") * golden.mask).sum(-1)
        ref = (golden.column("logp_ref") * golden.mask).sum(-1)
        close(new, wanted["seq_logp_new"])
        close(ref, wanted["seq_logp_ref"])
        algorithm, batch = PRESETS["dpo"], golden.batch("r_real")
        _, metrics = objective(
            golden.bind(algorithm, batch),
            batch,
            golden.plan(algorithm, batch),
            torch.arange(batch.num_tokens),
            golden.column("logp_new")[golden.mask],
        )
        margins = wanted["margins"]
        close(metrics["train/preference_margin"].value(), sum(margins) / len(margins))


def test_kl_estimators(golden: Any, close: Any) -> None:
    names = {"k1": "k1", "k2": "k2", "k3": "k3", "k3plus": "k3_plus", "abs": "abs"}
    for match, wanted in entries(golden, r"kl_loss_(\w+?)_token_mean"):
        logp = golden.column("logp_new")[golden.mask].requires_grad_()
        reference = golden.column("logp_ref")[golden.mask]
        per_token = kl_penalty(logp - reference, names[match[1]])  # type: ignore[arg-type]
        per_token.mean().backward()  # type: ignore[no-untyped-call]
        assert logp.grad is not None
        close(per_token.detach().mean(), wanted["loss"])
        close(unflatten(logp.grad, golden.mask), wanted["grad"])
        close(
            unflatten(per_token.detach(), golden.mask),
            golden.column_of(wanted["per_token"]) * golden.mask,
        )


def test_luffy_shapes_the_one_demonstration(golden: Any, close: Any) -> None:
    # The file does not say which row is the demonstration: exactly one reproduces it.
    for match, wanted in entries(golden, f"luffy_gamma{NUMBER}_const_norm"):
        algorithm = replace(
            PRESETS["luffy"], ratio=Ratio(demo_shaping=float(match[1])), regularize=()
        )
        fitting = 0
        for row in range(len(golden.mask)):
            demo = torch.arange(len(golden.mask)) == row
            loss, gradient = golden.loss(algorithm, golden.batch("r_real", demo=demo))
            fits = abs(loss - wanted["loss"]) < 1e-6
            fitting += fits
            if fits:
                close(gradient, wanted["grad"])
        assert fitting == 1


def test_luffy_leaves_its_entropy_bonus_apart(golden: Any) -> None:
    assert PRESETS["luffy"].term(Entropy) == Entropy(coef=0.001)


def test_clipped_value_loss(golden: Any, close: Any) -> None:
    for match, wanted in entries(golden, f"value_loss_clip{NUMBER}_token_mean"):
        algorithm = replace(
            PRESETS["ppo"],
            advantage=GAE(lam=1.0),
            regularize=(ValueLoss(clip=float(match[1])),),
        )
        batch = golden.batch("r_real")
        planned = golden.plan(algorithm, batch)
        assert planned.value_targets is not None
        close(unflatten(planned.value_targets, golden.mask), wanted["returns"])
        values = flatten(golden.column("values_new"), golden.mask).requires_grad_()
        loss, _ = value_objective(
            golden.bind(algorithm, batch), batch, planned, torch.arange(batch.num_tokens), values
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert values.grad is not None
        close(loss.detach(), wanted["loss"])
        close(unflatten(values.grad, golden.mask), wanted["grad_v"])


def test_vapo_parts(golden: Any, close: Any) -> None:
    for _, wanted in entries(golden, f"vapo_total_mu{NUMBER}"):
        correct = golden.column("r_bin") > 0
        tokens = golden.mask & correct.unsqueeze(-1)
        close(-golden.column("logp_new")[tokens].mean(), wanted["nll"])


def test_dppo_keep_masks(golden: Any) -> None:
    for match, wanted in entries(golden, f"dppo_keep_mask_(tv|kl)_{NUMBER}"):
        bound = float(match[2])
        batch = golden.batch("r_real")
        advantage = golden.plan(
            replace(PRESETS["dr_grpo"], advantage=GroupAdvantage()), batch
        ).advantage
        logp, anchor = golden.column("logp_new")[golden.mask], batch.logp_rollout
        tokens = Tokens(
            logp=logp,
            anchor=anchor,
            log_ratio=logp - anchor,
            advantage=advantage,
            mask=batch.trainable,
            row=batch.row,
            num_rows=batch.num_rows,
        )
        region = DivergenceMask(measure=match[1], low=bound, high=bound)  # type: ignore[arg-type]
        stopped = surrogate(region, tokens).bound
        assert stopped is not None
        kept = unflatten((~stopped).double(), golden.mask)
        assert kept.tolist() == wanted


@pytest.mark.only_file
def test_dppo_topk_divergence(golden: Any, close: Any) -> None:
    for match, wanted in entries(golden, r"dppo_topk_k(\d+)_sampled(\d+)"):
        k, sampled = int(match[1]), int(match[2])
        old, new = golden.column_of(wanted["mu"]), golden.column_of(wanted["p_new"])
        top = old.argsort(descending=True, stable=True)[:k]
        hit = torch.tensor([sampled in top.tolist()])
        tv, kl = topk_divergence(
            old[top].log().unsqueeze(0),
            new[top].log().unsqueeze(0),
            old[sampled].log().unsqueeze(0),
            new[sampled].log().unsqueeze(0),
            hit,
        )
        close(tv, [wanted["tv"]])
        close(kl, [wanted["kl"]])
        close((old - new).abs().sum() / 2, wanted["full_tv"])
        close((old - new)[sampled].abs(), wanted["binary_tv"])
