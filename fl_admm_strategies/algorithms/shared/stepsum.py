"""S, the sum of the step sizes of a client's round, and the weight of a proximal term by it.

A strategy that goes by S has the column `COLUMN` in its table of clients. It asks for reports with
``wants_step_sum`` until S is known, and takes them in by `noted_step_sum` after each round. See
docs/methods/fedadmm-notes.md, P9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from logging import INFO
from statistics import median

from flwr.common import log

from ...maths.clienttable import ClientTable
from ...runtime.messages.records import STEP_SUM, Reply

COLUMN = "step_sum"
"""The column of a client's report, which starts at 0.0: none yet."""
FIXED_PULL = 0.1  # the weight of the proximal term until S is known
_PULL = 0.3  # that weight times S
_REPORTS = 3  # a median of at least three reports: one false report cannot set it
_LARGEST = 1e9  # S beyond it, or below its inverse, is no sum of step sizes


def pull_by(step_sum: float) -> float:
    """Return the weight of the proximal term: 0.3/S, and `FIXED_PULL` where S is NaN."""
    return FIXED_PULL if math.isnan(step_sum) else _PULL / step_sum


def noted_step_sum(table: ClientTable, replies: Mapping[int, Reply]) -> float:
    """Keep the reports of some clients; return S, the median of all reports.

    Returns
    -------
    float
        NaN until three clients have reported, or all where they are fewer.
    """
    for client, reply in replies.items():
        said = reply.metrics.get(STEP_SUM, 0.0)
        if 1 / _LARGEST < said < _LARGEST:
            setattr(table[client], COLUMN, said)
    known = [said for said in table.column(COLUMN).tolist() if said]
    if len(known) < min(_REPORTS, len(table)):
        return math.nan
    found: float = median(known)
    log(
        INFO,
        f"The sum of the step sizes of a client's round is {found:.3g} (median of {len(known)}): "
        f"{_PULL} over it, which the penalty follows, is {pull_by(found):.3g}",
    )
    return found
