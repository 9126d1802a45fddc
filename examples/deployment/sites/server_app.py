"""What runs at the server."""

import json
from functools import partial
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.numpy import save_file

from fl_admm_strategies import FLAME, FPFC, AsyncFPFC, FedADMM, SmoothedSCAD

from .task import make_model

STRATEGIES = {
    "fpfc": partial(FPFC, SmoothedSCAD(lam=0.6), lr=0.2, local_epochs=2),
    "async-fpfc": partial(AsyncFPFC, SmoothedSCAD(lam=0.6), lr=0.2, local_epochs=2),
    "flame": partial(FLAME, lam=1.0, rho=0.3, lr=0.2, local_epochs=2),
    "fedadmm": partial(FedADMM, rho=0.1, lr=0.2, local_epochs=2),
}

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a strategy; write every round and the final state into the folder `out`/`name`."""
    config = context.run_config
    if not Path(config["out"]).is_absolute():
        raise ValueError(f"out is {config['out']!r}, expected an absolute path on the server.")
    out = Path(config["out"]) / config["name"]
    out.mkdir(parents=True, exist_ok=True)
    client_keys = config["client-keys"]
    if "=" in client_keys:
        pairs = (pair.split("=", 1) for pair in client_keys.split())
        client_keys = {int(client): key for client, key in pairs}
    make_strategy = STRATEGIES[config["strategy"]]
    strategy = make_strategy(
        min_available_nodes=config["min-available-nodes"],
        max_missed_rounds=config["max-missed-rounds"] or None,
        client_keys=client_keys,
    )

    def on_round(server_round, metrics):
        trained = sorted(strategy.train_metrics.get(server_round, {}))
        with (out / "rounds.jsonl").open("a") as rounds:
            rounds.write(json.dumps({"round": server_round, "trained": trained, **metrics}) + "\n")

    strategy.start(
        grid,
        ArrayRecord(make_model().state_dict()),
        num_rounds=config["num-rounds"],
        evaluate_every=config["evaluate-every"],
        on_round=on_round,
        checkpoint_dir=out / "checkpoints",
        resume=True,  # after the newest checkpoint; where there is none, from the start
    )
    save_file(strategy.state_dict(), out / "state.safetensors")
