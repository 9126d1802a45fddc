"""Texts for hypothesis, whose own alphabet is all of Unicode: its table takes a second to make."""

from __future__ import annotations

from functools import partial

from hypothesis import strategies as st

ALPHABET = "aZ09_-.,:=@'\"[]{}()#/\\ \n\r\t\0\x7fé\u0301ß漢\u202e\u2028\ufeff\U0001f600"
"""Of each kind: letters, marks, controls, what turns, breaks or ends a line, beyond 16 bits."""

text = partial(st.text, ALPHABET)
