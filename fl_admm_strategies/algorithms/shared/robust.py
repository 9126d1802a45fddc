"""Robust rules in the place of a server's mean: what uploads come to where some of them lie.

    krum           the upload closest to its n - f - 2 nearest others, in sum of squared distances
    multi-krum     the plain mean of the n - f uploads that are closest so
    median         the median in every coordinate
    trimmed-mean   the mean in every coordinate without the f lowest and the f highest

n uploads were received, of which f = floor(malicious n) are taken for false. Krum and multi-Krum:
Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent", NeurIPS 2017, arXiv:1703.02757. Median and trimmed mean: Yin, Chen, Ramchandran,
Bartlett, ICML 2018, arXiv:1803.01498. The mathematics is Flower's own; see docs/robustness.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Literal, cast

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp.strategy import FedMedian, FedTrimmedAvg, MultiKrum

from ...maths.blocks import Arrays, as_dtype
from ...maths.checks import Share
from ...runtime.messages.records import ARRAYS, METRICS, NUM_EXAMPLES, Reply, to_array_record
from ...runtime.messages.schema import Instruction
from ...runtime.uploads import Altered, Upload
from .models import OneMessageStrategy

RuleName = Literal["krum", "multi-krum", "median", "trimmed-mean"]
Aggregation = Literal["mean", RuleName]


@dataclass
class _Uploaded:
    """A reply as Flower's rules read it; a `Message` can be made by Flower's own app only."""

    content: RecordDict

    def has_error(self) -> bool:
        return False


def taken_for_false(malicious: float, num_uploads: int) -> int:
    """Return f, how many of the uploads of a round are taken for false."""
    return int(malicious * num_uploads + 1e-9)  # 0.29 * 100 is a little less than 29


def check_enough(rule: RuleName, malicious: float, num_uploads: int) -> None:
    """Raise ValueError if so few uploads are no work for a rule; the message says how many are.

    A score of Krum's is over n - f - 2 neighbours, the median of two is their mean, and a trimmed
    mean is to cut off one upload at least.
    """
    if rule == "median":
        least = 3.0
    elif rule == "trimmed-mean":
        least = math.ceil(1 / malicious - 1e-9) if malicious else 1
    else:
        least = math.floor(2 / (1 - malicious) + 1e-9) + 1 if malicious < 1 else math.inf
    if num_uploads < least:
        raise ValueError(
            f"A round has {num_uploads} uploads, expected {least:g} or more for "
            f"aggregation={rule!r} with malicious={malicious:g}. Let more clients train in a "
            "round, change malicious, or take another aggregation."
        )


def aggregate(rule: RuleName, malicious: float, uploads: Sequence[Arrays]) -> Arrays:
    """Return what a rule makes of the uploads of a round, which all have the same weight.

    Parameters
    ----------
    rule : {"krum", "multi-krum", "median", "trimmed-mean"}
    malicious : float
        The share of the uploads that is taken for false.
    uploads : sequence of Arrays
        Of the same names and shapes. The rule sees the floating point arrays, in double precision:
        Flower's distances are differences of squares. Of integers, such as a batch norm's counter,
        it is the rounded median.

    Raises
    ------
    ValueError
        If there are too few: see `check_enough`.
    """
    n, f = len(uploads), taken_for_false(malicious, len(uploads))
    check_enough(rule, malicious, n)
    flowers: MultiKrum | FedMedian | FedTrimmedAvg
    if rule == "median":
        flowers = FedMedian()
    elif rule == "trimmed-mean":
        flowers = FedTrimmedAvg(beta=(f + 0.25) / n)  # it rounds n beta down
    else:
        selected = 1 if rule == "krum" else n - f
        flowers = MultiKrum(num_malicious_nodes=f, num_nodes_to_select=selected)
    first = uploads[0]
    floating = [name for name, array in first.items() if array.dtype.kind == "f"]
    one, replies = MetricRecord({NUM_EXAMPLES: 1}), []
    for upload in uploads:
        wide = to_array_record({name: upload[name].astype(np.float64) for name in floating})
        replies.append(_Uploaded(RecordDict({ARRAYS: wide, METRICS: one})))
    arrays, _ = flowers.aggregate_train(0, cast(list[Message], replies))
    assert arrays is not None
    made = {name: array.numpy() for name, array in arrays.items()}
    for name in first.keys() - made.keys():
        made[name] = np.median([upload[name] for upload in uploads], axis=0)
    return {name: as_dtype(made[name], array.dtype) for name, array in first.items()}


@dataclass(frozen=True)
class RobustRule:
    """A robust rule on the way of a round's uploads: each becomes what the rule makes of all.

    The mean of the round is then that of the rule.
    """

    rule: RuleName
    malicious: float

    def apply(self, server_round: int, replies: dict[int, Reply]) -> Altered:
        """Return the replies with the rule's upload; where they are too few, with what was sent."""
        if not replies:
            return Altered(replies, {})
        uploads = [reply.arrays for reply in replies.values()]
        try:
            made = aggregate(self.rule, self.malicious, uploads)
        except ValueError as error:
            log(WARNING, "Round %s changes nothing: %s", server_round, error)
            made = next(iter(next(iter(replies.values())).sent.groups.values()))
        found = {
            client: replace(reply, arrays=made, num_examples=1.0)
            for client, reply in replies.items()
        }
        return Altered(found, {})


class RobustStrategy(OneMessageStrategy):
    """Base of the methods that may take a robust rule in place of a mean of models.

    Parameters
    ----------
    aggregation : {"mean", "krum", "multi-krum", "median", "trimmed-mean"} (default: "mean")
        What w is of the participants' models: their mean, or a rule that endures false uploads.
        All uploads have the same weight in a rule. See docs/robustness.md.
    malicious : float (default: 0.2)
        The share of a round's uploads that a rule, other than the median, takes for false.
    **base
        The parameters of `StatefulStrategy`.

    Raises
    ------
    ValueError
        When the run starts, if fewer clients train in a round than the rule needs.
    """

    aggregation: Aggregation = "mean"
    malicious: Share = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation == "trimmed-mean" and self.malicious >= 0.5:
            raise ValueError(
                f"malicious is {self.malicious}, expected a number in [0, 0.5) for a trimmed mean: "
                "so much is cut off at both ends. Lower it, or take another aggregation."
            )

        if self.aggregation != "mean":
            self.run.alterations.append(RobustRule(self.aggregation, self.malicious))

    @property
    def upload(self) -> Upload:
        """A part of a mean; a robust rule needs every upload for itself."""
        is_mean = self.aggregation == "mean"
        return Upload("mean", stateless=True) if is_mean else Upload("own copy")

    def train_instructions(
        self, server_round: int, client_ids: Sequence[int]
    ) -> Mapping[int, Instruction]:
        """Refuse a run with rounds that are too small for the rule."""
        if server_round == 1 and self.aggregation != "mean":
            check_enough(self.aggregation, self.malicious, len(client_ids))
        return super().train_instructions(server_round, client_ids)
