"""Whose a client's id is: a node with a key keeps what it brought, others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients import client_app
from fl_admm_strategies.runtime.members.client_keys import ClientKeys, fingerprint, read_keys
from fl_admm_strategies.runtime.messages.packing import pack_replies, unpack_instructions
from fl_admm_strategies.runtime.messages.records import RawReply
from tests.support.federation import (
    Adding,
    Federation,
    KeyedGrid,
    Mean,
    Online,
    client_fn_of,
    public_key,
    trained,
)
from tests.support.refusals import Warned, refused

MODEL = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
KEYS = [fingerprint(public_key(site)) for site in range(9)]

# Nodes 2, 3, 4 are clients 0, 1, 2. Client 1's node is gone from round 2 on, and node 5 says that
# it is client 1: the site itself under another node id, or somebody else.
WHO = (0, 1, 2, 1)
GONE: Online = {0: [2, 3, 4], 2: [2, 4, 5]}
SAME_SITE, ANOTHER = (0, 1, 2, 1), (0, 1, 2, 3)
WITH_1, WITHOUT_1 = [0, 1, 2], [0, 2]


def mean(**settings: Any) -> Mean:
    return Mean(seed=1, fraction_evaluate=0, **{"node_timeout": 0.3} | settings)


def grid_of(online: Online, partitions: Any = WHO, sites: Any = ANOTHER) -> KeyedGrid:
    return KeyedGrid(client_app(client_fn_of(Adding)), partitions, online, sites)


def run(grid: Federation, num_rounds: int = 3, folder: Path | None = None, **base: Any) -> Mean:
    strategy = mean(**base)
    options = {} if folder is None else {"checkpoint_dir": folder, "resume": True}
    strategy.start(grid, MODEL, num_rounds, **options)
    return strategy


# --- Fingerprints ---------------------------------------------------------------------------------


def test_a_fingerprint_is_the_one_that_ssh_keygen_prints() -> None:
    # Made with: ssh-keygen -q -t ecdsa -b 384 -N "" -f key; ssh-keygen -e -m pkcs8 -f key.pub
    pem = b"""-----BEGIN PUBLIC KEY-----
MHYwEAYHKoZIzj0CAQYFK4EEACIDYgAETtKMHn13HOsHsn+2p/UtFCWuQwQFs3H+
xf62ZRjzVfwvEozF1+6K3WBcKy3n8/Fe4IcUXPC3mo6DB7p15FIwT0T0B+KeRVKu
cBnpFQPRgUcAQwm/j0sw2yvlJJqvHDa8
-----END PUBLIC KEY-----
"""
    assert fingerprint(pem) == "SHA256:g9YAozhkNceDTLPPFTHiCD5328FbQXM3/pfZCHfBxD4"


# --- In a run -------------------------------------------------------------------------------------


def test_a_site_with_a_new_node_id_is_known_by_its_key(warned: Warned) -> None:
    strategy = run(grid_of(GONE, sites=SAME_SITE))
    assert trained(strategy) == {1: WITH_1, 2: WITH_1, 3: WITH_1}
    assert warned("left out") == []


def test_another_site_is_refused_with_what_to_do(warned: Warned) -> None:
    assert trained(run(grid_of(GONE))) == {1: WITH_1, 2: WITHOUT_1, 3: WITHOUT_1}
    said = warned("node 5", "[1]", f"client 1: {KEYS[1]}", f"client_keys={{1: '{KEYS[3]}'}}")
    assert len(said) == len(warned("left out")) == 1


def test_any_node_may_be_any_client_if_the_user_says_so() -> None:
    strategy = run(grid_of(GONE), client_keys="any")
    assert trained(strategy) == {1: WITH_1, 2: WITH_1, 3: WITH_1}
    assert strategy.membership.client_keys.keys == {0: KEYS[0], 1: KEYS[3], 2: KEYS[2]}


def test_a_node_that_hosts_many_must_own_each_of_their_ids(warned: Warned) -> None:
    claims = {2: [0, 10, 11], 3: [1], 4: [2], 5: [11, 12], 6: [12, 13]}

    class Packed(KeyedGrid):
        """Nodes 2 and 6 are of site 0; node 6 has another share of its clients."""

        def __init__(self, online: Online) -> None:
            super().__init__(app, (0, 1, 2, 3, 4), online, (0, 1, 2, 3, 0))

    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        ids = claims[int(context.node_config["partition-id"]) + 2]
        config = ConfigRecord({"client-ids": ids, "num-clients": 0})
        return Message(RecordDict({"config": config}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        replies = {
            client: RawReply(next(iter(asked.groups.values())), {"num-examples": 1})
            for client, asked in unpack_instructions(message.content)
        }
        return Message(pack_replies(replies), reply_to=message)

    online: Online = {0: [2, 3, 4], 2: [3, 4, 5], 3: [3, 4, 5, 6]}
    strategy = run(Packed(online), 4, max_clients_per_node=3)
    assert trained(strategy)[1] == [0, 1, 2, 10, 11]
    assert trained(strategy)[2] == [1, 2]  # nobody is client 12, who came with another's 11
    assert trained(strategy)[4] == [1, 2, 12, 13]
    assert warned("left out", "[11]", f"client 11: {KEYS[0]}")
    # By default a node with a key is one client.
    strategy = run(Packed({0: [2, 3, 4]}), 1)
    assert strategy.client_ids == [1, 2]
    assert warned("node 2", "3 clients", "max_clients_per_node")


def test_the_id_of_a_client_that_left_stays_its_own() -> None:
    # Client 1 leaves before round 3. Node 5 may not come instead of it, node 6 is its site's.
    online = {0: [2, 3, 4], 2: [2, 4], 4: [2, 4, 5], 5: [2, 4, 5, 6]}
    grid = grid_of(online, (0, 1, 2, 1, 1), (0, 1, 2, 3, 1))
    members: dict[int, list[int]] = {}
    strategy = mean(max_missed_rounds=2)
    strategy.start(
        grid, MODEL, 5, on_round=lambda r, _: members.update({r: list(strategy.client_ids)})
    )
    assert members == {1: WITH_1, 2: WITH_1, 3: WITHOUT_1, 4: WITHOUT_1, 5: WITH_1}
    assert grid.words[5] == [("query", 0)]


# --- Before round 1, and in a run that goes on ----------------------------------------------------


def test_ids_can_be_given_before_anybody_comes(warned: Warned) -> None:
    # Node 2 says that it is client 0, and is there first.
    grid = grid_of({0: [2, 3, 4, 5]}, (0, 1, 2, 0), (7, 1, 2, 0))
    strategy = run(grid, client_keys={0: KEYS[0]})
    assert trained(strategy) == dict.fromkeys((1, 2, 3), WITH_1)
    assert grid.words[2] == [("query", 0)]
    assert len(warned("left out")) == len(warned("left out", "node 2", "[0]")) == 1


@pytest.mark.slow
def test_ids_belong_to_the_same_nodes_in_a_resumed_run(tmp_path: Path) -> None:
    run(grid_of({0: [2, 3, 4]}), 2, tmp_path)
    elsewhere = grid_of({0: [2, 4, 5]})
    with refused(TimeoutError, "[1]", "Node 5"):
        run(elsewhere, 4, tmp_path)
    assert elsewhere.words[5] == [("query", 0)]
    strategy = run(grid_of({0: [2, 4, 5]}), 4, tmp_path, max_missed_rounds=9)
    assert trained(strategy) == {1: WITH_1, 2: WITH_1, 3: WITHOUT_1, 4: WITHOUT_1}
    assert trained(run(grid_of({0: [2, 4, 5]}, sites=SAME_SITE), 5, tmp_path))[5] == WITH_1


@pytest.mark.parametrize("admit", ["any", {1: KEYS[3]}], ids=["any", "by name"])
def test_who_was_admitted_is_the_owner_from_then_on(tmp_path: Path, admit: Any) -> None:
    run(grid_of({0: [2, 3, 4]}), 2, tmp_path)
    assert trained(run(grid_of({0: [2, 4, 5]}), 3, tmp_path, client_keys=admit))[3] == WITH_1
    assert trained(run(grid_of({0: [2, 4, 5]}), 4, tmp_path))[4] == WITH_1
    with refused(TimeoutError, "Node 3"):
        run(grid_of({0: [2, 3, 4]}), 5, tmp_path)


# --- The setting and the state --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "named"),
    [
        ("last", TypeError, "'last'"),
        (None, TypeError, "None"),
        ({"0": KEYS[0]}, ValueError, "'0'"),
        ({0: "SHA256:short"}, ValueError, "'SHA256:short'"),
    ],
)
def test_the_constructor_refuses(value: Any, error: type[Exception], named: str) -> None:
    with refused(error, "client_keys", named):
        mean(client_keys=value)


def test_a_state_holds_the_owners() -> None:
    strategy = run(grid_of(GONE))
    state = strategy.state_dict()
    again = ClientKeys()
    again.reset({name.removeprefix("base/"): array for name, array in state.items()})
    assert again.keys == {client: KEYS[client] for client in (0, 1, 2)}
    state["base/owner_keys"][1] = 0
    with refused(ValueError, "owner_keys"):
        mean().load_state_dict(state)
    assert read_keys({}) == {}
