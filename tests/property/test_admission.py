"""The bound on staleness, for any order in which rollouts finish: by the rules alone."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.errors import ConfigError
from turngym.rl.admission import Admission


class Run:
    """Rollouts that finish in whatever order `pick` says, and a trainer that takes batches."""

    def __init__(self, prompts: int, staleness: int, batches: int) -> None:
        self.rules = Admission(prompts, staleness)
        self.batches = batches
        self.begun: dict[int, int] = {}
        self.in_flight: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.trained: list[int] = []
        self.ages: list[int] = []

    def admit(self) -> None:
        outstanding = len(self.in_flight) + len(self.finished)
        left = self.batches - self.rules.formed
        for _ in range(self.rules.room(outstanding, left=left)):
            number = len(self.begun)
            self.begun[number] = self.rules.pushed
            self.in_flight[number] = self.rules.due

    def finish(self, place: int) -> None:
        number = list(self.in_flight)[place % len(self.in_flight)]
        self.finished[number] = self.in_flight.pop(number)

    def train(self) -> bool:
        chosen = sorted(self.finished)[: self.rules.prompts]
        rest = [due for number, due in self.finished.items() if number not in chosen]
        if len(chosen) < self.rules.prompts or not self.rules.fits(
            [*self.in_flight.values(), *rest]
        ):
            return False
        self.ages += [self.rules.formed - self.begun[number] for number in chosen]
        self.trained += chosen
        for number in chosen:
            del self.finished[number]
        self.rules.formed += 1
        return True


@settings(max_examples=300, deadline=None)
@given(
    prompts=st.integers(1, 4),
    staleness=st.integers(0, 4),
    batches=st.integers(1, 8),
    stubborn=st.integers(0, 3),
    seed=st.integers(0, 1 << 32),
)
def test_whatever_finishes_first_nothing_trains_too_late_or_twice_or_never(
    prompts: int, staleness: int, batches: int, stubborn: int, seed: int
) -> None:
    rng = random.Random(seed)
    run = Run(prompts, staleness, batches)
    run.admit()
    while run.rules.formed < batches:
        assert len(run.in_flight) + len(run.finished) <= (staleness + 1) * prompts
        is_training = run.rules.pushed < run.rules.formed
        if is_training and rng.random() < 0.5:
            run.rules.pushed = run.rules.formed
            run.admit()
        elif len(run.in_flight) > stubborn and rng.random() < 0.5:
            run.finish(stubborn + rng.randrange(99))  # the oldest hold out
        elif not is_training and run.train():
            run.admit()
        elif not is_training:
            assert run.in_flight, "the trainer waits and nothing is under way"
            run.finish(rng.randrange(99))
    assert max(run.ages) <= staleness
    assert sorted(run.trained) == list(run.begun) == list(range(batches * prompts))


def test_a_group_that_could_train_now_waits_when_older_ones_would_come_too_late() -> None:
    rules = Admission(prompts=1, staleness=2, formed=1, pushed=1)
    assert rules.due == 3
    assert rules.fits([2, 3])
    assert not rules.fits([2, 2])
    assert not rules.fits([1])


def test_rollouts_pause_while_a_synchronous_trainer_works() -> None:
    rules = Admission(prompts=3, staleness=0)
    assert rules.room(0) == 3
    assert rules.room(2) == 1
    rules.formed = 1
    assert rules.room(0) == 0
    rules.pushed = 1
    assert rules.room(0) == 3
    assert rules.room(0, left=0) == 0


def test_one_step_off_samples_the_next_batch_during_training() -> None:
    rules = Admission(prompts=3, staleness=1, formed=1, pushed=0)
    assert rules.room(0) == 3
    assert rules.due == 1


@pytest.mark.parametrize(("prompts", "staleness"), [(0, 1), (1, -1)])
def test_numbers_that_make_no_sense_are_refused(prompts: int, staleness: int) -> None:
    with pytest.raises(ConfigError, match=f"got {prompts} and {staleness}"):
        Admission(prompts, staleness)
