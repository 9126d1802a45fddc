"""What the clients share: the round, the memory, the solvers, the app that hosts them."""
