"""The guide page 'Deployment', command by command, and what it says about sites that die.

The slow tests run SuperLinks, SuperNodes and `flwr` on loopback with the commands of the guide,
except that free ports take the place of those that it names.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest
from flwr.app import Context, RecordDict
from safetensors.numpy import load_file

from fl_admm_strategies import InProcessGrid
from tests.support.federation import assert_same_bits, not_asking

ROOT = Path(__file__).parents[1]
APP = ROOT / "examples" / "deployment"
GUIDE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
PORTS = ("8000", "9094", "9095", "9096", "9097")

# What the guide's commands leave in the folder of the app.
IGNORED = [line.strip("/") for line in (APP / ".gitignore").read_text(encoding="utf-8").split()]

# No command of the guide takes longer than this, however busy the machine; nor does any step of a
# run. They are there so that nothing hangs, not to measure anything.
PATIENCE = 600.0
# Every process is killed after this, even where nobody is left to do it.
LIFETIME = "1800"


def section(title: str) -> list[str]:
    """Return the shell blocks of a section of the guide, in order."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", GUIDE, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def inline(start: str) -> str:
    """Return the command that stands in the text of the guide and starts so."""
    (command,) = re.findall(rf"`({start} [^`]*)`", GUIDE)
    return command


def is_service(block: str) -> bool:
    """Return whether a block starts something that runs until it is stopped."""
    return block.startswith(("flower-superlink", "flower-supernode"))


(ENVIRONMENT,) = section("What runs where")
(INSTALL, CHANGE_FOLDER, *PLAIN) = section("Three sites on one machine")
(FAILING_RUN, STATUS) = section("Did it succeed\\?")
(MORE_DATA, NEW_SITE) = section("Sites that join and leave")
SECURE = section("TLS and known sites")
LOG, STOP = inline("flwr log"), inline("flwr stop")
LOCK_OUT = inline("flwr supernode unregister")
FINGERPRINT = inline("ssh-keygen -lf")


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


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.split("\n")[0][:40])
def test_every_block_is_shell(block: str) -> None:
    subprocess.run(["bash", "-n", "-c", block], check=True)


def invocations() -> dict[tuple[str, ...], set[str]]:
    """Return the Flower commands of the guide and the options each is given."""
    found: dict[tuple[str, ...], set[str]] = {}
    lines = "".join(blocks()).replace("\\\n", " ").splitlines()
    for line in [*lines, LOG, STOP, LOCK_OUT]:
        words = shlex.split(line.partition(" | ")[0]) if line.startswith("fl") else []
        if not words:
            continue
        depth = 1 if words[0] != "flwr" else 3 if words[1] == "supernode" else 2
        options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        found.setdefault(tuple(words[:depth]), set()).update(options)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", invocations(), ids=" ".join)
def test_flower_has_the_options(command: tuple[str, ...], tmp_path: Path) -> None:
    help_text = subprocess.run(
        [*command, "--help"],
        env=environment(tmp_path) | {"COLUMNS": "200"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for option in invocations()[command]:
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_text), option


def test_the_settings_of_a_run_are_those_of_the_app() -> None:
    settings = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))
    known = settings["tool"]["flwr"]["app"]["config"]
    given = re.findall(r'-c "(.*?)"', GUIDE)
    assert given
    for text in given:
        assert re.findall(r"([\w-]+)=", text) != []
        assert set(re.findall(r"([\w-]+)=", text)) <= set(known)


# --- A federation of real processes ---------------------------------------------------------------


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a process: quiet, on one thread, with a Flower home of its own."""
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def kill_all_of(service: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started; they may have ended already."""
    with suppress(ProcessLookupError):
        os.killpg(service.pid, signal.SIGKILL)
    service.wait(PATIENCE)


class Federation:
    """Runs the guide's commands in a copy of the example app; what it starts dies with `stop`.

    Attributes
    ----------
    folder : Path
        The copy, which must not exist yet. Logs and Flower's home stand beside it: what is in the
        folder of an app travels with it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(APP, folder, ignore=shutil.ignore_patterns(*IGNORED))
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self._services: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, block: str) -> str:
        """Run a block to its end; return what it wrote."""
        process = self._launch(block, subprocess.PIPE)
        try:
            output = process.communicate(timeout=PATIENCE)[0].decode(errors="replace")
        finally:
            kill_all_of(process)
        print(f"$ {block}{output}")
        assert process.returncode == 0, f"exit code {process.returncode}"
        return output

    def start(self, name: str, block: str) -> None:
        """Start a service; what it writes goes to a file of its name."""
        with self.log(name).open("ab") as log:
            self._services[name] = self._launch(f"exec {block}", log)

    def _launch(self, block: str, output: IO[bytes] | int) -> subprocess.Popen[bytes]:
        text = re.sub(rf"\b({'|'.join(PORTS)})\b", lambda port: self._ports[port[0]], block)
        return subprocess.Popen(
            ["timeout", "--signal=KILL", LIFETIME, "bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=environment(self.folder.parent / "home"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def start_all(self, services: Sequence[str]) -> None:
        """Start a SuperLink and wait for it, then its SuperNodes, by the names link, 0, 1, 2."""
        link, *sites = services
        self.start("link", link)
        self.wait("the SuperLink answers", self.link_answers)
        for number, site in enumerate(sites):
            self.start(str(number), site)

    def link_answers(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", int(self._ports["8000"]))) == 0

    def wait(self, what: str, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            for name, service in self._services.items():
                assert service.poll() is None, f"{name} ended while waiting until {what}"
            assert time.monotonic() < deadline, f"waited {PATIENCE:g} s until {what}"
            time.sleep(0.2)

    def wait_for_sites(self, connection: str, count: int) -> None:
        def online() -> bool:
            listed = subprocess.run(
                ["flwr", "supernode", "list", connection, "--format", "json"],
                cwd=self.folder,
                env=environment(self.folder.parent / "home"),
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            return listed.stdout.count('"online"') == count

        self.wait(f"{count} sites are online", online)

    def log(self, name: str) -> Path:
        return self.folder.parent / f"{name}.log"

    def node_of(self, name: str) -> str:
        """Return the id that the SuperLink gave to a SuperNode when it was last started."""
        text = self.log(name).read_text(errors="replace")
        found: list[str] = re.findall(r"SuperNode ID: (\d+)", text)
        return found[-1]

    def kill(self, name: str) -> None:
        """Kill a service and all that it started, without a chance to sign off."""
        kill_all_of(self._services.pop(name))

    def forget(self, name: str) -> subprocess.Popen[bytes]:
        """Return a service that may end and that the caller ends from now on."""
        return self._services.pop(name)

    def stop(self) -> None:
        """Kill everything; show the end of what it wrote, for the report of a test that failed."""
        for name in list(self._services):
            self.kill(name)
        for log in sorted(self.folder.parent.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")


def rounds(out: Path) -> list[dict[str, Any]]:
    path = out / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- The same app in this process -----------------------------------------------------------------


@cache
def module(name: str) -> Any:
    """Import a module of the example app, as Flower does: with the app's folder on the path."""
    sys.path.insert(0, str(APP))
    try:
        return __import__(f"sites.{name}", fromlist=[name])
    finally:
        sys.path.remove(str(APP))


def run_here(
    folder: Path,
    away: Mapping[int, Sequence[int]],
    connected: Callable[[int], Sequence[int]] = lambda _: range(3),
    **settings: Any,
) -> Path:
    """Run the app in this process and return its results.

    Parameters
    ----------
    folder : Path
        Where the data are.
    away : mapping of int to sequence of int
        By round, the clients that are not sampled.
    connected : callable
        Returns the sites whose node is connected in a round.
    """
    defaults = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))
    here = folder.parent / "here"
    config = defaults["tool"]["flwr"]["app"]["config"] | settings | {"out": str(here)}
    data = [folder / "data" / f"site-{i}.npz" for i in range(3)] + [folder / "more" / "site-3.npz"]
    with InProcessGrid(
        module("client_app").app,
        len(data),
        run_config=config,
        node_configs=[
            {
                "partition-id": i,
                "num-partitions": 3,
                "data": str(path),
                "state": str(here / "state"),
            }
            for i, path in enumerate(data)
        ],
    ) as grid:
        nodes = grid.get_node_ids()
        grid.get_node_ids = lambda: [  # type: ignore[method-assign]
            nodes[site] for site in connected(len(rounds(here / str(config["name"]))) + 1)
        ]
        server = module("server_app")
        strategies = dict(server.STRATEGIES)
        make = strategies[config["strategy"]]
        server.STRATEGIES[config["strategy"]] = lambda **base: not_asking(make(**base), away)
        try:
            server.app(grid=grid, context=Context(1, 1, {}, RecordDict(), config))
        finally:
            server.STRATEGIES.update(strategies)
    return here / str(config["name"])


def trained(out: Path) -> dict[int, list[int]]:
    """Return by round who trained; of a round that came again, the second time counts."""
    return {line["round"]: line["trained"] for line in rounds(out)}


def state_of(out: Path) -> dict[str, Any]:
    """Return the final state but for the sites' keys, which clients in this process have not."""
    arrays = load_file(out / "state.safetensors")
    return {name: array for name, array in arrays.items() if not name.startswith("base/owne")}


def assert_same_results(out: Path, expected: Path) -> None:
    assert trained(out) == trained(expected)
    assert_same_bits(state_of(out), state_of(expected))
    assert rounds(out)[-1] == rounds(expected)[-1]


# --- The guide, for real --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """The federation of 'Three sites on one machine', started as the guide says."""
    federation = Federation(tmp_path_factory.mktemp("plain") / "app")
    try:
        for block in PLAIN[:-1]:
            if not is_service(block):
                federation.run(block)
        federation.start_all([block for block in PLAIN if is_service(block)])
        federation.wait_for_sites("sites", 3)
        yield federation
    finally:
        federation.stop()


@pytest.fixture
def shown(sites: Federation) -> Iterator[Federation]:
    """The federation; what its processes wrote during the test is shown if it fails."""
    sizes = {log: log.stat().st_size for log in sites.folder.parent.glob("*.log")}
    yield sites
    for log in sorted(sites.folder.parent.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[sizes.get(log, 0) :]}")


def status(federation: Federation) -> str:
    """Return what the guide's command says of the last run; it fails unless the run completed."""
    return federation.run(STATUS)


def last_run(federation: Federation) -> str:
    """Return the id of the last run, as the first word of what the guide's command prints."""
    found = re.search(r"^(\d+) ", federation.run(f"({STATUS}) || true"), flags=re.MULTILINE)
    assert found is not None
    return found[1]


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


@contextmanager
def running(federation: Federation, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run `flwr run` on the federation with settings of the app; kill it if it is left alive."""
    settings["out"] = str(federation.folder / "results")
    text = " ".join(f"{key}={value!r}" for key, value in settings.items())
    federation.start("run", f'flwr run . sites --stream -c "{text}"')
    run = federation.forget("run")
    try:
        yield run
    finally:
        kill_all_of(run)


# The run waits until all three are there again, however long a SuperNode takes to start.
ALL_THREE: dict[str, Any] = {"num-rounds": 4, "evaluate-every": 4, "min-available-nodes": 3}
# Without TLS, a SuperNode that is started again has another key.
ANYBODY = {"client-keys": "any"}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param("fpfc", marks=pytest.mark.slow), pytest.param("flame", marks=pytest.mark.long)],
)
def test_a_site_that_is_killed_comes_back(shown: Federation, strategy: str) -> None:
    settings = ALL_THREE | ANYBODY | {"name": f"site-{strategy}", "strategy": strategy}
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
        # Nobody gets in who is not registered.
        federation.run(keys.replace("0 1 2", "stranger"))
        stranger = services[1].replace("keys/site-0", "keys/site-stranger")
        federation.start("stranger", stranger.replace("9094", free_ports(1)[0]))
        refused = federation.forget("stranger")
        try:
            assert refused.wait(PATIENCE) != 0
        finally:
            kill_all_of(refused)
        assert "Failed to initialize the connection" in federation.log("stranger").read_text()
    finally:
        federation.stop()
