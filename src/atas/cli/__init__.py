"""The command `atas`: one sub-command a file."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

import typer

from atas import __version__
from atas._utils.console import is_rank0
from atas.cli import bench, compare, data, evaluate, export, ls, report, reproduce, train
from atas.errors import AtasError

app = typer.Typer(
    name="atas",
    help="Robust image classifiers by fast adversarial training. Try: atas train digits-small-cnn-atas",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("ls")(ls.ls)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("reproduce")(reproduce.reproduce)
app.command("bench")(bench.bench)

_Misuse: Any = typer.BadParameter.__base__  # UsageError of click, which some versions of typer carry within


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version, is_eager=True),
) -> None:
    pass


def main() -> None:
    """Run the command; errors that a user can mend are one sentence on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a letter that a terminal does not have is no reason to fail
    try:
        sys.exit(app(prog_name="atas", standalone_mode=False))
    except AtasError as error:
        _fail(str(error), error.exit_status, on_all_ranks=error.on_all_ranks)
    except _Misuse as error:
        if type(error).show is not _Misuse.show:  # the help, where a command was called with nothing
            error.show()
            sys.exit(error.exit_code)
        _fail(_misused(error), error.exit_code, on_all_ranks=True)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 1, on_all_ranks=True)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        remedy = "make room on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the path"
        on_all_ranks = getattr(error, "on_all_ranks", False)
        _fail(f"{error.strerror or error}{where}; {remedy} and try again", 1, on_all_ranks=on_all_ranks)


def _misused(error: Any) -> str:
    """One sentence about a wrong option or argument, from what typer has to say of it."""
    said = " ".join(error.format_message().split()).removesuffix(".")  # choices stand in lines of their own
    said = said.replace(": Value error, ", ": ").replace(". Choose from:", ", one of").replace(". Did", "; did")
    command = error.ctx.command_path if error.ctx else "atas"
    see = " See" if said.endswith("?") else "; see"
    return f"{said[:1].lower()}{said[1:]}{see} {command} --help"


def _fail(sentence: str, status: int, *, on_all_ranks: bool) -> None:
    """End with a sentence; what every process of torchrun would say, the first one says."""
    if on_all_ranks and not is_rank0():
        sys.exit(status)
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print("[bold red]atas:[/]", end=" ")
    print(sentence, file=sys.stderr)
    sys.exit(status)
