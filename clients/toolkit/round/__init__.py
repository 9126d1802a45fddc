"""A client's round: who begins it, what it keeps, and what ends it.

`base.MethodClient` has the round of every client, `torch_client.TorchClient` that of a PyTorch
model; `own_model`, `split_model` and `two_headed` are for clients with a personal part, `linear`
and `completion` for clients without PyTorch. `memory.Memory` keeps what a client holds between
rounds, `app.client_app` hosts clients, and `after` serves new clients when a run is over.
"""
