"""The settings that all strategies share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict

from ..maths.checks import check_choice, check_count, check_fraction, check_positive
from .messages.wire import WireDtype
from .trust.bound import MaxNorm, OnExcess


class BaseSettings(TypedDict, total=False):
    """The parameters of `StatefulStrategy`, for the ``**base`` of those that derive from it."""

    fraction_evaluate: float
    min_evaluate_nodes: int
    min_available_nodes: int
    node_timeout: float
    max_clients_per_node: int | None
    max_missed_rounds: int | None
    client_keys: str | Mapping[int, str]
    patience: int
    max_norm: MaxNorm
    on_excess: OnExcess
    max_examples: int | None
    weighted_by_key: str
    wire_dtype: WireDtype
    state_on_disk: str | os.PathLike[str] | None
    seed: int


def check_base_settings(of: Any) -> None:
    """Raise ValueError or TypeError where a strategy's is out of range; `Bound` checks its own."""
    check_fraction("fraction_evaluate", of.fraction_evaluate, zero=True)
    check_count("min_evaluate_nodes", of.min_evaluate_nodes, least=0)
    check_count("min_available_nodes", of.min_available_nodes, least=1)
    check_positive("node_timeout", of.node_timeout)
    for name in ("max_clients_per_node", "max_missed_rounds", "max_examples"):
        if getattr(of, name) is not None:
            check_count(name, getattr(of, name), least=1)
    check_count("patience", of.patience, least=1)
    check_choice("wire_dtype", of.wire_dtype, (None, "float16"))
    check_count("seed", of.seed, least=0)
