"""The settings that all strategies share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict

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
