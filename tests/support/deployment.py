"""A federation of real processes, started with the commands of the guide page 'Deployment'."""

from __future__ import annotations

import json
import os
import re
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

from flwr.app import Context, RecordDict
from safetensors.numpy import load_file

from fl_admm_strategies import InProcessGrid
from tests.support.federation import assert_same_bits, not_asking

ROOT = Path(__file__).parents[2]
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
    ports : dict of str to str
        What the guide's ports are here.
    """

    def __init__(self, folder: Path, app: Path = APP) -> None:
        self.folder = folder
        shutil.copytree(app, folder, ignore=shutil.ignore_patterns(*IGNORED))
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
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
        text = re.sub(rf"\b({'|'.join(PORTS)})\b", lambda port: self.ports[port[0]], block)
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
            return one.connect_ex(("127.0.0.1", int(self.ports["8000"]))) == 0

    def wait(self, what: str, happened: Callable[[], object]) -> None:
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

    def has_logged(self, name: str, pattern: str) -> bool:
        """Return whether what a service, or the last run, wrote has a line with a pattern."""
        return re.search(pattern, self.log(name).read_text(errors="replace")) is not None

    def kill(self, name: str) -> None:
        """Kill a service and all that it started, without a chance to sign off."""
        kill_all_of(self._services.pop(name))

    def forget(self, name: str) -> subprocess.Popen[bytes]:
        """Return a service that may end and that the caller ends from now on."""
        return self._services.pop(name)

    def close(self) -> None:
        """Kill everything."""
        for name in list(self._services):
            self.kill(name)

    def stop(self) -> None:
        """Kill everything; show the end of what it wrote, for the report of a test that failed."""
        self.close()
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


def status(federation: Federation) -> str:
    """Return what the guide's command says of the last run; it fails unless the run completed."""
    return federation.run(STATUS)


def last_run(federation: Federation) -> str:
    """Return the id of the last run, as the first word of what the guide's command prints."""
    found = re.search(r"^(\d+) ", federation.run(f"({STATUS}) || true"), flags=re.MULTILINE)
    return found[1]


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
