"""How many training samples of every class the clients of a data set have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulations.data import FederatedData


def class_counts(data: FederatedData) -> NDArray[np.int64]:
    """Count training labels: shape (m, num_classes), row i for client i."""
    return np.stack(
        [np.bincount(c.train[1].numpy(), minlength=data.num_classes) for c in data.clients]
    )
