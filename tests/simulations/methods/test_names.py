"""Methods by name, and the client that goes with each."""

from __future__ import annotations

import pytest

import clients
import fl_admm_strategies
from clients import FedGiAClient, FedGiALinearClient, FPFCClient, SGDClient
from fl_admm_strategies import FPFC, FedAvg, FedGiA, StatefulStrategy
from simulations.data import FederatedData, RatingsData, TabularData
from simulations.methods.tables import CLIENTS, METHODS, client_of, data_of, strategy_named
from simulations.problems import FactorProblem, LinearProblem, TorchProblem


def test_every_strategy_of_the_library_has_a_name() -> None:
    exported = {getattr(fl_admm_strategies, name) for name in fl_admm_strategies.__all__}
    strategies = {
        thing
        for thing in exported
        if isinstance(thing, type) and issubclass(thing, StatefulStrategy)
    }
    robust = {"fedmedian", "fedtrimmedavg", "krum", "multi-krum"}
    assert all(issubclass(METHODS[name], FedAvg) for name in robust)
    found = {METHODS[name] for name in METHODS.keys() - robust}
    assert found == strategies - {StatefulStrategy, StatefulStrategy}
    assert METHODS.keys() >= {"fpfc", "fedmc-admm", "lp-proj-admm"}  # not fedmcadmm


def test_every_client_has_its_strategy_and_every_strategy_a_client() -> None:
    assert {client.__name__ for client in CLIENTS} == {
        name for name in clients.__all__ if name.endswith("Client")
    } - {"MethodClient", "MirrorClient", "TorchClient"}
    for strategy in METHODS.values():
        assert data_of(strategy)


def test_the_client_is_chosen_by_the_kind_of_data() -> None:
    assert client_of(FedGiA, TorchProblem) is FedGiAClient
    assert client_of(FedGiA, LinearProblem) is FedGiALinearClient
    assert client_of(FedGiA, FactorProblem) is None
    assert data_of(FedGiA) == [FederatedData, TabularData]
    assert client_of(FPFC, TorchProblem) is FPFCClient
    assert client_of(FPFC, LinearProblem) is None
    assert client_of(METHODS["krum"], TorchProblem) is SGDClient  # by FedAvg's
    assert data_of(METHODS["fedmc-admm"]) == [RatingsData]


def test_an_unknown_name_is_answered_with_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"unknown baseline 'fedavrg'. Did you mean 'fedavg'"):
        strategy_named("fedavrg", "baseline")
