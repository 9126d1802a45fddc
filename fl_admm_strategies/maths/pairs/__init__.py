"""FPFC's pairs of clients: their algebra, the store of their vectors, and its kernels."""

from __future__ import annotations

from .store import PairwiseStore

__all__ = ["PairwiseStore"]
