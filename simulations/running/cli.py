"""The command line: ``fl-admm`` or ``python -m simulations``, and what to do."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

# All else is imported by the command that needs it: PyTorch, Flower and scikit-learn take seconds.
from ..experiments.catalogue import experiment_names, read_experiment
from .host import Engine, Host

if TYPE_CHECKING:
    from ..experiments.experiment import RunConfig
    from .run import PreparedRun

cli = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run the experiments of fl-admm-strategies.",
)

_INTERRUPTED = 130  # the exit code of what Ctrl-C ended

# Options of several commands.
_Name = Annotated[str, typer.Argument(help="An experiment's name, or a TOML file.")]
_Profile = Annotated[str, typer.Option(help="One of the experiment's profiles.")]
_DataRoot = Annotated[
    Path | None, typer.Option(help="Folder of the data files (default: $FL_ADMM_DATA).")
]
_Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: training.num-rounds=50"),
]
_Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show Flower's and Ray's messages, and tracebacks.")
]


def _program() -> list[str]:
    """Return the words that started this program."""
    name = Path(sys.argv[0]).name
    return [name] if name == "fl-admm" else ["python", "-m", "simulations"]


@cli.command("list")
def list_names(
    methods: Annotated[
        bool, typer.Option("--methods", help="Show the methods, each with its paper.")
    ] = False,
) -> None:
    """Show every experiment: its name, what it does, its profiles."""
    rows = []
    if methods:
        from ..methods import METHODS

        rows = [(name, str(m.__doc__).partition("\n")[0], m.paper) for name, m in METHODS.items()]
    else:
        for name in experiment_names():
            settings = read_experiment(name)
            profiles = ", ".join(settings.get("profiles", ())) or "none"
            rows.append((name, settings["title"], f"profiles: {profiles}"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for name, what, more in rows:
        table.add_row(Text(name, style="bold cyan", no_wrap=True), f"{what}\n[dim]{more}")
    Console().print(table)


@cli.command()
def describe(
    name: _Name,
    profile: _Profile = "",
) -> None:
    """Show an experiment with all its settings, defaults among them, as a file that `run` takes."""
    from ..data import options_of
    from ..experiments.loading import load_settings

    with _errors_explained(False, "", lambda: ""):
        settings = load_settings(name, profile=profile)
        options = {key: v for key, v in options_of(settings.data.name).items() if v is not None}
        data = settings.data.model_copy(update={"options": options | settings.data.options})
        print(settings.model_copy(update={"data": data}).to_toml())


@cli.command()
def run(
    name: _Name,
    engine: Annotated[Engine, typer.Option(help="Flower's on Ray, or this process.")] = Engine.RAY,
    workers: Annotated[int | None, typer.Option(min=0, help="Clients at a time.")] = None,
    gpus_per_client: Annotated[
        float, typer.Option(min=0, help="Share of a GPU that a client gets on Ray.")
    ] = 0.0,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes that host the clients between them.")
    ] = None,
    profile: _Profile = "",
    change: _Changes = None,
    seed: Annotated[int | None, typer.Option(min=0, help="In place of the file's.")] = None,
    data_root: _DataRoot = None,
    out: Annotated[
        Path | None, typer.Option(help="Results folder (default: runs/NAME-TIME).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, or the last unfinished.")
    ] = False,
    verbose: _Verbose = False,
) -> None:
    """Run an experiment: train, then a table beside the published numbers, and plots."""
    from ..experiments.experiment import RunConfig
    from .run import prepare

    config = RunConfig(name, profile, tuple(change or ()), seed, data_root, out, resume)

    host = Host(engine, workers, nodes, gpus_per_client)

    def how_to_go_on() -> str:
        return resuming(config.out)

    with _errors_explained(verbose, "The run failed.", how_to_go_on):
        # Whatever is wrong is said here, before an engine takes its time.
        host.check()
        prepared = prepare(config, engine.value)
        config = replace(config, out=prepared.out)
        settings = prepared.experiment.settings
        num_clients = prepared.experiment.problem.num_clients
        Console().print(
            f"{settings.title}\n{num_clients} clients, {settings.training.num_rounds} rounds; "
            f"starting the engine ({engine.value}) ...",
            highlight=False,
            markup=False,
        )
        with _ending_ray(how_to_go_on) if engine is Engine.RAY else nullcontext():
            _run(prepared, config, host.num_nodes(num_clients), host, verbose)


@cli.command()
def compare(
    context: typer.Context,
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD... | FILE.toml [METHOD...]",
            help="Methods, ALIAS=METHOD for one with settings of its own; or a comparison file.",
        ),
    ],
    data: Annotated[str | None, typer.Option(help="A data set, or yourmodule:function.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many (default: 5).")] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=SPACE",
            help="lr=log:0.01:1 of all methods, ditto.lam=linear:0:1 of one, int:1:10.",
        ),
    ] = None,
    work: Annotated[
        float | None,
        typer.Option(help="Passes over its samples that a client makes in a round, of any method."),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Trials of tuning for each method (default: 20).")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,VALUE,...", help="Run each of some values of a setting."),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Report rounds and bytes until the metric was as good.")
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="Has data, model, rounds and settings (default: compare).")
    ] = None,
    profile: _Profile = "",
    change: _Changes = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the results; a comparison in it goes on.")
    ] = Path("comparison"),
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time.")] = None,
    data_root: _DataRoot = None,
    verbose: _Verbose = False,
) -> None:
    """Compare methods over seeds, tuned alike: tables, tests and pictures on one page."""
    from ..comparing import comparison as comparisons
    from ..comparing.compare import compare as run_comparison
    from ..comparing.report import write_report
    from ..experiments.loading import key_and_value, key_and_values

    console = Console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    again = "The same command goes on with what is there."
    with _errors_explained(verbose, "The comparison failed.", lambda: again):
        file = Path(methods[0]) if methods[0].endswith(".toml") else None
        names = ("data", "seeds", "work", "budget", "target", "experiment", "profile")
        given = {name: context.params[name] for name in names}
        given |= {
            "methods": None if file else methods,
            "tune": {key: str(value) for key, value in map(key_and_value, tune or ())},
            "sweep": dict(map(key_and_values, sweep or ())),
            "set": dict(map(key_and_value, change or ())),
        }
        options = {key: value for key, value in given.items() if value not in (None, "", {})}
        comparison = comparisons.read(file, options)
        if file is not None and len(methods) > 1:
            comparison = comparison.only(methods[1:])
        outcomes = run_comparison(comparison, out, data_root, workers, say)
        files = write_report(comparison, outcomes, out)
    say(f"Results: {out.resolve()}: {', '.join(files)}")
    if failed := sum("error" in run for one in outcomes for run in one.runs):
        _say(f"{failed} cells failed; the report says why. The same command runs them again.")
        raise typer.Exit(1)


def resuming(out: Path | None) -> str:
    """Return what is saved of a run that came to no end, and the command that goes on with it."""
    from fl_admm_strategies.runtime.saving.checkpoints import rounds_in

    from .folder import CHECKPOINTS

    if out is None:
        return "The run had not begun."
    more = ["--resume"] if "--out" in sys.argv else ["--out", str(out), "--resume"]
    command = shlex.join([*_program(), *sys.argv[1:], *more])
    rounds = rounds_in(out / CHECKPOINTS)
    saved = f"The run is saved up to round {rounds[-1]}" if rounds else "No round is saved yet"
    return f"{saved}; go on with: {command}"


@contextmanager
def _errors_explained(
    verbose: bool, failed: str, how_to_go_on: Callable[[], str]
) -> Iterator[None]:
    """Say in a sentence what went wrong, unless all messages are wanted, and end the command."""
    from fl_admm_strategies.runtime.saving.files import NotWrittenError

    signal.signal(signal.SIGINT, signal.default_int_handler)
    _quieten(verbose)
    try:
        yield
    except KeyboardInterrupt:
        _say(f"Interrupted. {how_to_go_on()}")
        raise typer.Exit(_INTERRUPTED) from None
    except Exception as error:
        if verbose:
            raise
        _explain(error, failed)
        if isinstance(error, NotWrittenError):
            _say(how_to_go_on())
        raise typer.Exit(1) from None


@contextmanager
def _ending_ray(how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C end this process and Ray's.

    Flower waits in the main thread for threads that do not hear of it, until the last round.
    """
    import psutil  # here: without the extra, the sentence about it comes first

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say(f"Interrupted. {how_to_go_on()}")
        sys.stdout.flush()
        # Not ray.shutdown(): the next call of Flower's threads would start another Ray, and the
        # agents of a raylet that does not end within a second stay for a minute.
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(_INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(
    prepared: PreparedRun, config: RunConfig, num_nodes: int, host: Host, verbose: bool
) -> None:
    from fl_admm_strategies import run_in_process

    from .apps import make_client_app, make_server_app

    server_app, client_app = make_server_app(prepared), make_client_app(config)
    if host.engine is Engine.INPROCESS:
        run_in_process(server_app, client_app, num_nodes, workers=host.workers or 0)
        return
    try:
        from flwr.simulation import run_simulation
    except ImportError as error:
        raise RuntimeError(
            "Ray is not installed: pip install 'fl-admm-strategies[sim]', or --engine inprocess"
        ) from error
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=num_nodes,
        backend_config=host.ray_config(verbose),
        verbose_logging=verbose,
    )


def _quieten(verbose: bool) -> None:
    """Leave of Flower's and Ray's messages only what the user must see."""
    if verbose:
        return
    flower = logging.getLogger("flwr")
    flower.setLevel(logging.WARNING)
    # Flower calls run_simulation deprecated in favour of `flwr run`, which has no exit code.
    flower.addFilter(lambda record: "run_simulation" not in record.getMessage())
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for Ray's processes


def _say(line: str) -> None:
    console = Console(stderr=True)
    console.show_cursor()  # a progress bar hides it
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _explain(error: Exception, failed: str) -> None:
    console = Console(stderr=True)
    expected = isinstance(error, ValueError | TypeError | OSError | RuntimeError | TimeoutError)
    kind = "" if expected else f"{type(error).__name__}: "
    console.print(Text.assemble((f"{failed} " if failed else "", "bold red"), kind), end="")
    console.print(str(error), markup=False, highlight=False, soft_wrap=True)
    if failed:
        console.print("Run again with --verbose for the traceback.", style="dim")


def main() -> None:
    """Run the command line; Ctrl-C ends it silently until a command has its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        cli(prog_name=" ".join(_program()))
    except ModuleNotFoundError as error:  # of an import of ours; a command explains the user's own
        _say(f"{error.name} is not installed: pip install 'fl-admm-strategies[compare]'.")
        sys.exit(1)
