"""A client's round: the bases of the clients, what they keep, the app that hosts them."""
