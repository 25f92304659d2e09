import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.decode_draw import draw, uniforms


def draw_many(
    logits: list[float], *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw 20,000 tokens of one distribution; return frequencies and log-probabilities by id."""
    count = 20_000
    table = torch.tensor(logits).expand(count, -1)
    uniform = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    token, logp = draw(
        table,
        uniform,
        np.full(count, temperature, np.float32),
        np.full(count, top_p, np.float32),
        np.full(count, top_k, np.int64),
    )
    frequency = np.bincount(token.numpy(), minlength=len(logits)) / count
    by_id = np.full(len(logits), np.nan)
    by_id[token.numpy()] = logp.numpy()
    return frequency, by_id


# Probabilities .5, .25, .125, .125; 20,000 draws have a standard error below .0036, and the seeds
# are fixed: the tolerance of .015 is more than four of them.
LOGITS = [np.log(p).item() for p in (0.125, 0.5, 0.125, 0.25)]


def test_frequencies_follow_the_probabilities() -> None:
    frequency, logp = draw_many(LOGITS)
    np.testing.assert_allclose(frequency, [0.125, 0.5, 0.125, 0.25], atol=0.015)
    np.testing.assert_allclose(logp, LOGITS, atol=1e-6)


def test_temperature_sharpens() -> None:
    frequency, logp = draw_many(LOGITS, temperature=0.5)
    want = np.array([1, 16, 1, 4]) / 22
    np.testing.assert_allclose(frequency, want, atol=0.015)
    np.testing.assert_allclose(logp, np.log(want), atol=1e-6)


def test_top_k_renormalises_over_what_it_keeps() -> None:
    frequency, logp = draw_many(LOGITS, top_k=2)
    np.testing.assert_allclose(frequency, [0, 2 / 3, 0, 1 / 3], atol=0.015)
    np.testing.assert_allclose(logp[[1, 3]], np.log([2 / 3, 1 / 3]), atol=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.6, 2), (0.74, 2), (0.8, 3), (0.99, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    frequency, _ = draw_many(LOGITS, top_p=top_p)
    assert int((frequency > 0).sum()) == kept


def test_greedy_takes_the_first_of_the_likeliest_at_temperature_one() -> None:
    frequency, logp = draw_many([1.0, 3.0, 3.0, 0.0], temperature=0.0)
    assert frequency.tolist() == [0, 1, 0, 0]
    want = 3 - np.log(np.exp([1.0, 3.0, 3.0, 0.0]).sum())
    assert logp[1] == pytest.approx(want, abs=1e-6)


def test_impossible_tokens_are_never_drawn_even_at_the_ends() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    ends = np.array([0.0, 0.5, 1 - 2.0**-52])
    one, zero = np.ones(3, np.float32), np.zeros(3, np.int64)
    token, _ = draw(logits, ends, one, one, zero)
    assert token.tolist() == [1, 3, 3]


def test_truncated_neighbours_leave_a_row_as_it_is() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    uniform = np.array([0.3, 0.3])
    one = np.ones(2, np.float32)
    _, alone = draw(logits, uniform, one, one, np.array([0, 0]))
    _, beside = draw(logits, uniform, one, one, np.array([0, 3]))
    assert alone[0] == beside[0]
    assert alone[1] != beside[1]


@settings(deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=8),
    index=st.integers(0, 2**31),
)
def test_a_number_depends_on_its_own_seed_and_index_alone(seeds: list[int], index: int) -> None:
    together = uniforms(np.array(seeds, np.uint64), np.full(len(seeds), index))
    for seed, number in zip(seeds, together, strict=True):
        assert uniforms(np.array([seed], np.uint64), np.array([index]))[0] == number
        assert 0 <= number < 1


def test_numbers_of_neighbouring_seeds_and_indices_are_uncorrelated() -> None:
    seeds, index = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    numbers = uniforms(seeds.ravel(), index.ravel()).reshape(200, 200)
    # 40,000 numbers: standard errors .0014 of the mean and .005 of a correlation.
    assert numbers.mean() == pytest.approx(0.5, abs=0.006)
    for other in (numbers[1:], numbers[:, 1:]):
        same = numbers[: other.shape[0], : other.shape[1]]
        assert abs(np.corrcoef(same.ravel(), other.ravel())[0, 1]) < 0.02
