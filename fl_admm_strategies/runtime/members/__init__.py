"""Who takes part: which clients there are, which node has them, who is sampled.

It owns the ids of the run's clients and what each surely holds, and hands on `Membership`,
`Sampling`, the keys of nodes, and what finds clients and waits for them.
"""
