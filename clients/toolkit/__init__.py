"""What the clients share.

`round` (a client's round, its memory, the app that hosts it) over `solving` (local solvers), over
`models` and `data`.
"""
