"""The Flower App: experiments that run the strategies on Ray, in-process or in a deployment.

From a file to its numbers: `settings` (what a file may say), `experiments` (the files, and how one
is read and described), `data`, `problems` (what is learned from data, and how it is scored),
`methods` (both halves of a method over a problem), `reports` (what a run says about itself),
`comparing` (methods compared over seeds) and `running` (what starts a run and carries it through).
Imports run the other way: `running`, `comparing`, `experiments`, `reports`, `methods`, `problems`,
`data`, `settings`. What attacks do to a client stands beneath them all, in `attacks.py`.

`python -m simulations`, or `fl-admm`, is the command line; Flower loads
``simulations.server_app:app`` and ``simulations.client_app:app``.
"""
