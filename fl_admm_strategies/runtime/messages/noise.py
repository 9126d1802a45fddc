"""What a message says of noise that a client is to add to its upload itself."""

from __future__ import annotations

import numpy as np

from ...maths.blocks import Arrays

CLIP, NOISE = "privacy-clip", "privacy-noise"
"""The settings: C, and the standard deviation of the noise."""
NOISED = "privacy-noised"
"""The metric of a reply by which its client says that it did."""


def with_noise(upload: Arrays, sent: Arrays, clip: float, std: float) -> Arrays:
    """Return an upload that is clipped to a distance from what was sent, with noise.

    The noise is the operating system's chance. From the seed in the message the server would know
    it. An array that was not sent is measured from 0.
    """
    before = {
        name: sent[name].astype(np.float64) if name in sent else np.zeros(array.shape)
        for name, array in upload.items()
    }
    change = {name: array - before[name] for name, array in upload.items()}
    norm = float(np.linalg.norm([np.linalg.norm(array) for array in change.values()]))
    scale, chance = min(1.0, clip / norm) if norm else 1.0, np.random.default_rng()
    return {
        name: np.asarray(
            before[name] + scale * change[name] + chance.normal(0.0, std, array.shape)
        ).astype(array.dtype)
        for name, array in upload.items()
    }
