"""What the clients share, in four rooms.

`round` (a client's round, its memory, the app that hosts it) stands over `solving` (local solvers),
which stands over `models` and `data`. Import the modules themselves: some need PyTorch, and clients
that need NumPy only must not load it.
"""
