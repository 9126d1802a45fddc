"""A run of a method, and what it is made of. It knows no method by name.

Read `run.py` first: one round from sampling to record. `strategy.py` puts it behind Flower's
current API, `algorithm.py` is the interface of a method. The rooms import one way: `trust` (which
reply is believed), `saving` (what outlives the process), `members` (who takes part), `messages`
(what travels) and `common` (settings and small helpers).
"""
