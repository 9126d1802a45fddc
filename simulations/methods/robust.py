"""FedAvg with a robust rule in the place of the mean, under the names of the rules' papers."""

from __future__ import annotations

from typing import ClassVar

from fl_admm_strategies import FedAvg
from fl_admm_strategies.algorithms.shared.robust import Aggregation

_YIN = "Yin, Chen, Ramchandran, Bartlett, ICML 2018, arXiv:1803.01498"
_BLANCHARD = "Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017, arXiv:1703.02757"


class FedMedian(FedAvg):
    """FedAvg with the coordinates' medians in place of the mean, by Flower's FedMedian."""

    paper: ClassVar = _YIN
    aggregation: Aggregation = "median"


class FedTrimmedAvg(FedAvg):
    """FedAvg with the coordinates' trimmed means, by Flower's FedTrimmedAvg."""

    paper: ClassVar = _YIN
    aggregation: Aggregation = "trimmed-mean"


class MultiKrum(FedAvg):
    """FedAvg with the mean of the n - f uploads nearest to others, by Flower's MultiKrum."""

    paper: ClassVar = _BLANCHARD
    aggregation: Aggregation = "multi-krum"


class Krum(FedAvg):
    """FedAvg with the one upload nearest to others in place of the mean, by Flower's Krum."""

    paper: ClassVar = _BLANCHARD
    aggregation: Aggregation = "krum"


ROBUST = (FedMedian, FedTrimmedAvg, Krum, MultiKrum)
