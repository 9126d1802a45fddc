"""FPFC's pairs of clients: their algebra, the store of their two forms, and its kernels."""

from __future__ import annotations

from .store import Groups, PairwiseStore

__all__ = ["Groups", "PairwiseStore"]
