"""The seeds that clients are told are NumPy's, in 63 bits."""

from __future__ import annotations

import numpy as np
import pytest

from fl_admm_strategies.maths.seeds import short
from fl_admm_strategies.runtime.members.sampling import Sampling


@pytest.mark.parametrize("seed", [0, 1, 2**40, 2**130 + 5])
@pytest.mark.parametrize("server_round", [0, 3, 2**33])
def test_a_client_has_the_seed_that_it_has_alone(seed: int, server_round: int) -> None:
    sampling = Sampling(
        fraction_train=1.0, fraction_evaluate=1.0, min_train=1, min_evaluate=1, seed=seed
    )
    clients = [0, 5, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
    expected = {
        client: int(
            np.random.SeedSequence([seed, client, server_round]).generate_state(1, np.uint64)[0]
            >> np.uint64(1)
        )
        for client in clients
    }
    assert sampling.client_seeds(clients, server_round) == expected
    assert sampling.client_seeds([], server_round) == {}


def test_a_long_seed_is_told_by_a_digest_of_63_bits() -> None:
    assert [short(seed) for seed in (0, 7, 2**63 - 1)] == [0, 7, 2**63 - 1]
    long = [2**63, 2**64 + 7, 2**100 + 1, 2**100 + 2]
    told = [short(seed) for seed in long]
    assert len(set(told)) == 4
    assert all(2**32 < seed < 2**63 for seed in told)
    assert not {*told} & {seed % 2**63 for seed in long}
