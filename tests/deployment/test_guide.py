"""The guide page 'Deployment', command by command, and what it says about sites that come and go.

The slow tests run SuperLinks, SuperNodes and `flwr` on loopback with the commands of the guide,
except that free ports take the place of those that it names.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import (
    ALL_THREE,
    ANYBODY,
    APP,
    CHANGE_FOLDER,
    ENVIRONMENT,
    FAILING_RUN,
    FINGERPRINT,
    GUIDE,
    INSTALL,
    LOCK_OUT,
    LOG,
    MORE_DATA,
    NEW_SITE,
    PATIENCE,
    PLAIN,
    SECURE,
    STATUS,
    STOP,
    Federation,
    assert_same_results,
    is_service,
    kill_all_of,
    last_run,
    rounds,
    run_here,
    running,
    state_of,
    status,
    trained,
)
from tests.support.federation import assert_same_bits

# --- The commands without running them ------------------------------------------------------------


def blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)


def test_every_block_is_used_by_the_slow_tests() -> None:
    assert CHANGE_FOLDER == "cd examples/deployment\n"
    # The environment that the tests run in: `.ci/run` makes it as README says.
    assert INSTALL.splitlines()[-1] == "pip install '.[sim]'"
    used = [ENVIRONMENT, INSTALL, CHANGE_FOLDER, *PLAIN, FAILING_RUN, STATUS, MORE_DATA, NEW_SITE]
    used += SECURE
    assert sorted(used) == sorted(blocks())
    assert sum(map(is_service, PLAIN)) == sum(map(is_service, SECURE)) == 4


def test_the_settings_of_a_run_are_those_of_the_app() -> None:
    settings = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))
    known = settings["tool"]["flwr"]["app"]["config"]
    given = re.findall(r'-c "(.*?)"', GUIDE)
    assert given
    for text in given:
        assert re.findall(r"([\w-]+)=", text) != []
        assert set(re.findall(r"([\w-]+)=", text)) <= set(known)


# --- The guide, for real --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_guides_run_has_the_bits_of_a_run_in_this_process(shown: Federation) -> None:
    shown.run(PLAIN[-1])
    assert "finished:completed" in status(shown)
    out = shown.folder / "results" / "one"
    assert [line["trained"] for line in rounds(out)] == [[0, 1, 2]] * 3
    assert_same_results(out, run_here(shown.folder, {}, name="one", strategy="fpfc"))


@pytest.mark.long
def test_replies_are_taken_in_as_they_come(shown: Federation) -> None:
    settings = ALL_THREE | {"name": "async", "strategy": "async-fpfc", "num-rounds": 7}
    with running(shown, **settings | {"evaluate-every": 7}) as run:
        assert run.wait(PATIENCE) == 0
    assert "finished:completed" in status(shown)
    lines = rounds(shown.folder / "results" / "async")
    assert [line["round"] for line in lines] == list(range(1, 8))
    assert all(len(line["trained"]) == 1 for line in lines)
    assert {site for line in lines for site in line["trained"]} == {0, 1, 2}
    assert [line["train-clock"] for line in lines] == sorted(line["train-clock"] for line in lines)
    assert "loss" in lines[-1]


@pytest.mark.long
def test_a_run_that_fails_exits_with_0_and_the_list_tells(shown: Federation) -> None:
    assert "exit code 0" in shown.run(FAILING_RUN)
    with pytest.raises(AssertionError, match="exit code 1"):
        status(shown)
    log = shown.run(LOG.replace("RUN_ID", last_run(shown)))
    assert "Traceback" in log
    assert "ValueError: out is 'results', expected an absolute path" in log


@pytest.mark.slow
def test_a_site_that_is_killed_comes_back(shown: Federation) -> None:
    settings = ALL_THREE | ANYBODY | {"name": "killed-site", "strategy": "fpfc"}
    settings |= {"num-rounds": 3, "evaluate-every": 3}
    began = shown.log("1").stat().st_size
    with running(shown, **settings) as run:
        shown.wait(
            "round 2 has reached site 1",
            lambda: "ROUND 2]" in shown.log("1").read_text(errors="replace")[began:],
        )
        shown.kill("1")
        shutil.rmtree(shown.folder / "state" / settings["name"] / "client-1")
        shown.start("1", [block for block in PLAIN if is_service(block)][2])
        assert run.wait(PATIENCE) == 0
    assert "finished:completed" in status(shown)
    out = shown.folder / "results" / settings["name"]
    lines = rounds(out)
    assert [line["round"] for line in lines] == [1, 2, 3]
    away = {line["round"]: [1] for line in lines if line["trained"] == [0, 2]}
    assert away  # it missed a round
    assert lines[0]["trained"] == lines[-1]["trained"] == [0, 1, 2]  # and was back for the last
    assert_same_results(out, run_here(shown.folder, away, **settings))


# As a system does that is out of memory.
DYING = """
import os
import signal


class Dying(FPFCClient):
    def fit(self, parameters, config):
        if self.context.node_config["partition-id"] == 1 and config["server-round"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(parameters, config)


CLIENTS["fpfc"] = Dying
"""


@pytest.mark.long
def test_training_that_is_killed_costs_its_client_one_round(shown: Federation) -> None:
    settings = ALL_THREE | {"name": "killed-training", "strategy": "fpfc"}
    settings |= {"num-rounds": 3, "evaluate-every": 3}
    app = shown.folder / "sites" / "client_app.py"
    before = app.read_text(encoding="utf-8")
    app.write_text(before + DYING, encoding="utf-8")
    try:
        with running(shown, **settings) as run:
            assert run.wait(PATIENCE) == 0
    finally:
        app.write_text(before, encoding="utf-8")
    assert "finished:completed" in status(shown)
    assert shown.has_logged("run", r"round 2: client 1 refused: .*ClientApp stopped responding")
    out = shown.folder / "results" / "killed-training"
    assert trained(out) == {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2]}
    assert_same_results(out, run_here(shown.folder, {2: [1]}, **settings))


@pytest.mark.long
def test_a_server_that_is_killed_goes_on(shown: Federation) -> None:
    settings = ALL_THREE | {"name": "server", "strategy": "fpfc"}
    out = shown.folder / "results" / "server"
    with running(shown, **settings):
        shown.wait("round 2 is over", lambda: len(rounds(out)) >= 2)
        shown.kill("link")
    shown.start("link", next(block for block in PLAIN if is_service(block)))
    shown.wait("the SuperLink answers", shown.link_answers)
    shown.wait_for_sites("sites", 3)
    before = len(rounds(out))
    with running(shown, **settings) as run:
        assert run.wait(PATIENCE) == 0
    assert "finished:completed" in status(shown)
    assert "Resuming after round" in shown.log("run").read_text()
    after = [line["round"] for line in rounds(out)[before:]]
    assert after[0] > 1  # it did not begin anew
    assert after[-1] == 4
    expected = run_here(shown.folder, {}, **settings)
    assert_same_bits(state_of(out), state_of(expected))


@pytest.mark.long
def test_a_site_joins_and_another_is_gone_for_good(tmp_path: Path) -> None:
    federation = Federation(tmp_path / "app")
    # The run is stopped when all has happened and then goes on for two rounds, so that it does not
    # matter how many rounds it takes on this machine.
    endless, name = 1000, "change"
    settings: dict[str, Any] = {"name": name, "strategy": "fpfc", "max-missed-rounds": 2}
    settings["evaluate-every"] = endless
    out, log = federation.folder / "results" / name, federation.log("run")

    def belongs(site: int) -> bool:
        return any(site in line["trained"] for line in rounds(out))

    def left() -> int:
        pattern = (
            r"round (\d+): clients \[1\] \(1\) have not been connected for 2 rounds; they have"
        )
        found = re.search(pattern, log.read_text(errors="replace"))
        return int(found[1]) if found else endless

    try:
        for block in [PLAIN[0], MORE_DATA, PLAIN[-2]]:  # data and connection
            federation.run(block)
        federation.start_all([block for block in PLAIN if is_service(block)])
        federation.wait_for_sites("sites", 3)
        with running(federation, **settings, **{"num-rounds": endless}) as run:
            federation.wait("round 1 is over", lambda: len(rounds(out)) >= 1)
            federation.start("3", NEW_SITE)
            federation.wait("site 3 has trained", lambda: belongs(3))
            federation.kill("1")
            federation.wait("site 1 has left", lambda: len(rounds(out)) >= left())
            federation.run(STOP.replace("RUN_ID", last_run(federation)))
            assert run.wait(PATIENCE) == 0
        assert "finished:stopped" in federation.run(f"({STATUS}) || true")
        settings["num-rounds"] = len(rounds(out)) + 2
        with running(federation, **settings) as run:
            assert run.wait(PATIENCE) == 0
        assert "finished:completed" in status(federation)
        who = trained(out)
        joined = min(server_round for server_round in who if 3 in who[server_round])
        assert 1 < joined < left()
        assert who[1] == [0, 1, 2]
        assert all(who[r] == [0, 2, 3] for r in range(left() - 1, settings["num-rounds"] + 1))

        def connected(server_round: int) -> list[int]:
            return [0, *[1] * (server_round <= left() - 2), 2, *[3] * (server_round >= joined)]

        # It was refused in the round in which it was killed.
        away = {r: [1] for r in who if 1 not in who[r]}
        assert_same_results(out, run_here(federation.folder, away, connected, **settings))
    finally:
        federation.stop()


def settings_of(run: str, settings: str) -> str:
    """Return the guide's last command with more settings for the run."""
    return run.replace("name='two'", f"name='two' {settings}")


@pytest.mark.long
def test_the_guides_secure_federation_runs(tmp_path: Path) -> None:
    federation = Federation(tmp_path / "app")
    services = [block for block in SECURE if is_service(block)]
    certificates, keys, register, run = [block for block in SECURE if not is_service(block)]
    try:
        federation.run(PLAIN[0])  # the data
        federation.run(certificates)
        federation.run(keys)
        federation.start("link", services[0])
        federation.wait("the SuperLink answers", federation.link_answers)
        federation.run(register)
        for number, service in enumerate(services[1:]):
            federation.start(str(number), service)
        federation.wait_for_sites("secure", 3)
        federation.run(run)
        here = run_here(federation.folder, {}, name="two", strategy="flame")
        out = federation.folder / "results" / "two"
        assert_same_results(out, here)
        # A site that is started again has the same key and the same node id: its id is its own.
        node = federation.node_of("1")
        federation.kill("1")
        federation.wait_for_sites("secure", 2)
        federation.start("1", services[2])
        federation.wait_for_sites("secure", 3)
        assert federation.node_of("1") == node
        federation.run(settings_of(run, "num-rounds=4"))
        assert trained(out)[4] == [0, 1, 2]
        # Another one, whom the SuperLink knows as well, claims the id while its owner is away.
        federation.run(keys.replace("0 1 2", "new"))
        federation.run(register.splitlines()[-1].replace("site-2", "site-new"))
        federation.kill("1")
        federation.wait_for_sites("secure", 2)
        federation.start("new", services[2].replace("keys/site-1", "keys/site-new"))
        federation.wait_for_sites("secure", 3)
        refused = federation.run(settings_of(run, "num-rounds=5"))
        mine, other = (
            federation.run(FINGERPRINT.replace("site-0", site)).split()[1]
            for site in ("site-1", "site-new")
        )
        reason = f"client 1: {mine}; its own: {other}"
        assert f"Node {federation.node_of('new')} is left out" in refused
        assert reason in refused
        assert "TimeoutError" in refused
        assert 5 not in trained(out)
        # The operator knows that site 1 has a new key, and says so; from then on the id is that's.
        federation.run(settings_of(run, f"num-rounds=5 client-keys='1={other}'"))
        federation.run(settings_of(run, "num-rounds=6"))
        assert [trained(out)[r] for r in (5, 6)] == [[0, 1, 2], [0, 1, 2]]
        # Who is locked out ends, and its key is not taken a second time.
        locked_out = federation.forget("0")
        try:
            federation.run(LOCK_OUT.replace("NODE_ID", federation.node_of("0")))
            locked_out.wait(PATIENCE)
        finally:
            kill_all_of(locked_out)
        again = f"({register.splitlines()[-3]}) || true"
        assert "Public key already in use" in federation.run(again)
    finally:
        federation.stop()
