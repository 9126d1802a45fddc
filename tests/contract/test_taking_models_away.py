"""After a run: every method's models, by client and cluster, with the model's own names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from clients import FPFCClient, LocalClient, client_app
from fl_admm_strategies import FPFC, InProcessGrid, Local, Models, SmoothedSCAD, load_models
from fl_admm_strategies.runtime.algorithm import OnClient
from fl_admm_strategies.runtime.saving.files import DamagedFileError
from tests.support.cases import Case, at_any_pace, grid_of
from tests.support.federation import (
    assert_same_bits,
    client_fn_of,
    initial_arrays,
    make_client,
    node_of,
)
from tests.support.refusals import Warned, refused


@at_any_pace
def test_models_are_those_of_the_run_on_disk_and_in_memory(case: Case, tmp_path: Path) -> None:
    grid, strategy = grid_of(case), case.strategy(seed=1)
    strategy.start(grid, case.initial_arrays(), 1, collect=True)
    models = strategy.models()
    stays = "personal" in strategy.kinds and isinstance(strategy.model("personal", 0), OnClient)
    if "global" in strategy.kinds:
        assert_same_bits(models.global_, strategy.global_model())
    if "personal" not in strategy.kinds:
        assert not models.personal
        assert ("global" if "global" in strategy.kinds else "cluster") in models.absent
        with refused(RuntimeError, "personal"):
            strategy.personal_models()
    else:
        assert list(strategy.personal_models()) == strategy.client_ids
        for client, arrays in models.personal.items():
            if stays:
                own = make_client(case.client_class, grid.context(node_of(client)))
                there = own.personal_arrays()  # type: ignore[attr-defined]
                assert_same_bits({name: arrays[name] for name in there}, there)
                rest = arrays.keys() - there.keys()  # what all share
                shared = strategy.global_model() if rest else {}
                assert_same_bits({n: arrays[n] for n in rest}, {n: shared[n] for n in rest})
            else:
                assert_same_bits(arrays, strategy.model("personal", client))
            if "factors" not in "".join(arrays):  # a whole state dict
                assert arrays.keys() == case.initial_arrays().keys()
    files = models.save(tmp_path / "models")
    assert [file.stem for file in files] == list(models.named())
    again = load_models(tmp_path)
    assert again.cluster_of == models.cluster_of
    assert (again.method, again.absent) == (type(strategy).__name__, models.absent)
    assert again.named().keys() == models.named().keys()
    for name, arrays in models.named().items():
        assert_same_bits(again.named()[name], arrays)
        assert_same_bits(load_file(tmp_path / "models" / f"{name}.safetensors"), arrays)


def test_clusters_are_numbered_by_size_and_know_their_clients(tmp_path: Path) -> None:
    strategy = FPFC(SmoothedSCAD(0.5), lr=0.2, local_epochs=1)
    with InProcessGrid(client_app(client_fn_of(FPFCClient)), 5) as grid:
        strategy.start(grid, initial_arrays(), 1)
    # Two clusters, that of clients 1, 3 and 4 is the larger; numbered from the first client it
    # would be the second.
    strategy.clusters = lambda nu=None: np.array([0, 1, 0, 1, 1])  # type: ignore[method-assign]
    models = strategy.models()
    assert models.cluster_of == {0: 2, 1: 1, 2: 2, 3: 1, 4: 1}
    assert list(models.named()) == [
        *("global", "cluster-1", "cluster-2"),
        *(f"client-{client}" for client in range(5)),
    ]
    models.save(tmp_path)
    assert load_models(tmp_path).cluster_of == models.cluster_of


class _Forgetful(LocalClient):
    def personal_arrays(self) -> dict[str, np.ndarray]:
        client = self.context.node_config["partition-id"]
        if client == 0:
            raise OSError("the disk is gone")
        own = super().personal_arrays()
        return own | ({"head.bias": np.full(3, np.nan)} if client == 1 else {})


def test_who_sends_no_usable_model_is_named_and_missing(warned: Warned) -> None:
    strategy = Local(lr=0.1)
    with InProcessGrid(client_app(client_fn_of(_Forgetful)), 3) as grid:
        strategy.start(grid, initial_arrays(), 1, collect=True)
        assert list(strategy.personal_models()) == [2]
        assert warned("client 0", "the disk is gone")
        assert warned("client 1", "head.bias", "NaN")
        # A run that was not asked to collect says what to do; that of before is not this one's.
        strategy.start(grid, initial_arrays(), 1)
    with refused(RuntimeError, "LocalClient", "collect=True"):
        strategy.personal_models()


def test_what_is_no_folder_of_models_is_refused(tmp_path: Path) -> None:
    with refused(FileNotFoundError, tmp_path):
        load_models(tmp_path)
    (file,) = Models("M", {"w": np.ones(2)}, absent="none").save(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with refused(DamagedFileError, file):
        load_models(tmp_path)
    file.unlink()
    with refused(DamagedFileError, file):
        load_models(tmp_path)
    (tmp_path / "models.json").write_text('{"models": []')
    with refused(DamagedFileError, tmp_path / "models.json"):
        load_models(tmp_path)


def test_a_model_is_not_taken_for_another_clients(tmp_path: Path) -> None:
    models = Models("M", personal={1: {"w": np.ones(2)}, 2: {"w": np.zeros(2)}})
    first, second = models.save(tmp_path)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with refused(DamagedFileError, first):
        load_models(tmp_path)


def test_models_of_a_run_before_are_not_among_those_of_this_one(tmp_path: Path) -> None:
    Models("M", personal={client: {"w": np.ones(2)} for client in range(3)}).save(tmp_path)
    Models("M", personal={0: {"w": np.ones(2)}}).save(tmp_path)
    assert list(load_models(tmp_path).personal) == [0]
