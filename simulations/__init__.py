"""The Flower App: experiments that run the strategies on Ray, in-process or in a deployment."""

from __future__ import annotations
