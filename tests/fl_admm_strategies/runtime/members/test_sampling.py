"""Who is drawn: uniformly, without replacement, from the run's seed alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_admm_strategies.runtime.members.sampling import Sampling


def sampling(**changes: Any) -> Sampling:
    settings: dict[str, Any] = {
        "fraction_train": 1.0,
        "fraction_evaluate": 1.0,
        "min_train": 1,
        "min_evaluate": 1,
        "seed": 0,
    }
    return Sampling(**settings | changes)


@pytest.mark.parametrize(
    ("num_clients", "fraction", "least", "expected"),
    [
        (100, 0.29, 1, 29),  # 0.29 * 100 = 28.999999999999996
        (10, 0.35, 1, 3),  # rounded down, as FedAvg does
        (10, 0.01, 1, 1),  # never nobody
        (10, 0.2, 5, 5),  # at least so many
        (10, 0.2, 50, 10),  # but not more than there are
    ],
)
def test_the_size_of_the_sample(num_clients, fraction, least, expected):
    clients = range(num_clients)
    for drawn in (
        sampling(fraction_train=fraction, min_train=least).for_training(clients),
        sampling(fraction_evaluate=fraction, min_evaluate=least).for_evaluation(clients),
    ):
        assert len(drawn) == expected
        assert drawn == sorted(set(drawn))


def test_sampling_is_uniform_and_without_replacement() -> None:
    # 2 of 10 in 2000 rounds: each client is drawn Bin(2000, 0.2) times, 400 with a standard
    # deviation of 17.9; all ten within 5 deviations.
    own = sampling(fraction_train=0.2)
    counts = np.zeros(10)
    for _ in range(2000):
        drawn = own.for_training(range(10))
        assert len(set(drawn)) == 2
        counts[drawn] += 1
    assert np.abs(counts - 400).max() < 90


def test_beside_those_that_train_so_many_are_drawn_that_there_are_as_many_as_ever() -> None:
    own = sampling(fraction_train=0.5)
    for busy in ({1}, {0, 1, 2, 3}, {2, 9}):
        drawn = own.for_training(range(10), busy)
        assert len(drawn) == 5 - len(busy)
        assert not busy & set(drawn)
    assert own.for_training(range(10), {1, 2, 3, 4, 5, 6}) == []


def test_evaluation_that_is_off_draws_nobody() -> None:
    assert sampling(fraction_evaluate=0.0, min_evaluate=2).for_evaluation(range(5)) == []


def test_training_does_not_hear_of_evaluation() -> None:
    one, other = sampling(fraction_train=0.3), sampling(fraction_train=0.3, fraction_evaluate=0.2)
    drawn = []
    for _ in range(10):
        drawn.append(one.for_training(range(20)))
        other.for_evaluation(range(20))
        assert other.for_training(range(20)) == drawn[-1]
    one.reset()  # from the seed again
    assert [one.for_training(range(20)) for _ in range(10)] == drawn
    assert sampling(fraction_train=0.3, seed=1).for_training(range(20)) != drawn[0]


def test_every_client_and_round_has_a_seed_of_its_own() -> None:
    def seeds(seed: int) -> list[int]:
        clients = (0, 1, 2**64 - 1)  # a node id may have 64 bits
        own = sampling(seed=seed)
        both = [own.client_seeds(clients, server_round) for server_round in (1, 2)]
        return [found[client] for found in both for client in clients]

    assert len({*seeds(0), *seeds(1)}) == 12
    assert seeds(0) == seeds(0)
    assert all(0 <= seed < 2**63 for seed in seeds(0))  # a ConfigRecord holds signed integers


def test_a_saved_generator_goes_on_where_it_was() -> None:
    own, other = sampling(fraction_train=0.3), sampling(fraction_train=0.3, seed=9)
    for _ in range(5):
        own.for_training(range(20))
        own.for_evaluation(range(7))
    saved = own.state_arrays()
    dtypes = {name: array.dtype.name for name, array in saved.items()}
    assert dtypes == {"train_rng": "uint8", "evaluate_rng": "uint8"}
    other.load_state_arrays(saved)
    for _ in range(5):
        assert other.for_training(range(20)) == own.for_training(range(20))
        assert other.for_evaluation(range(7)) == own.for_evaluation(range(7))
