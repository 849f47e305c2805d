"""The command `atas`, one file for each sub-command."""

from __future__ import annotations

import errno
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from atas import __version__
from atas._utils.console import is_rank0
from atas._utils.formatting import printable
from atas._utils.system import is_out_of_memory
from atas.cli import bench, compare, data, demo, evaluate, export, ls, report, reproduce, train
from atas.cli.completion import hint_for_option
from atas.errors import AtasError, nearest

app = typer.Typer(
    name="atas",
    help="Fast adversarial training of robust image classifiers. Try: atas train digits-small-cnn-atas",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("ls")(ls.ls)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("reproduce")(reproduce.reproduce)
app.command("bench")(bench.bench)

_REMEDIES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "end other programs",
    errno.ENOMEM: "free memory",
    errno.EAGAIN: "allow more processes (ulimit -u)",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EROFS: "choose another folder",
}
_CIRCLE = "Symlink loop from"  # a RuntimeError of pathlib before Python 3.13
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+)(?: (bytes|KiB|MiB|GiB|TiB))?")

# What typer's checks of numbers say.
_PLAINER = (
    (r"Input should be a valid integer, .*", "it must be a whole number"),
    (r"Input should be a valid number, .*", "it must be a number"),
    (r"Input should be greater than or equal to", "it must be at least"),
)

_Misuse: Any = typer.BadParameter.__base__  # click's UsageError; newer versions of typer vendor click


def _version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_version, is_eager=True
    ),
) -> None:
    pass


def main() -> None:
    """Run the command."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks must not raise
    with report_errors():
        sys.exit(app(prog_name="atas", standalone_mode=False))


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn expected errors into one sentence on standard error and an exit status."""
    try:
        yield
    except AtasError as error:
        _fail(str(error), error.exit_status, on_all_ranks=error.on_all_ranks)
    except _Misuse as error:
        if type(error).show is not _Misuse.show:  # a command without arguments shows its help
            error.show()
            sys.exit(error.exit_code)
        _fail(_misused(error), error.exit_code, on_all_ranks=True)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 1, on_all_ranks=True)
    except (OSError, MemoryError, RuntimeError, ImportError, SystemError) as error:
        sentence = _system_error(error)
        if sentence is None:  # a fault of this program
            raise
        _fail(f"{sentence} and try again", 1, on_all_ranks=getattr(error, "on_all_ranks", False))


def _system_error(error: Exception) -> str | None:
    """Return what the system refused and what to do about it; None for other errors."""
    if not isinstance(error, OSError):
        if str(error).startswith(_CIRCLE):
            return f"{str(error)[:1].lower()}{str(error)[1:]}; remove the link, or check the path"
        if not is_out_of_memory(error):
            return None
        size = _TRIED.search(str(error))
        wanted = f" (it asked for {size[1]} {size[2] or 'bytes'})" if size else ""
        which = "the GPU" if "CUDA" in str(error) else "this machine"
        return f"out of memory on {which}{wanted}; use a smaller batch size or smaller images, or end other programs,"
    remedy = _REMEDIES.get(error.errno or 0, "check the path")
    return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}; {remedy}"


def _misused(error: Any) -> str:
    """Turn typer's message about a wrong option or argument into one sentence."""
    message = " ".join(error.format_message().split()).removesuffix(".")  # choices are on separate lines
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):
        message = _unknown_option(error)
    for given, plain in _PLAINER:
        message = re.sub(given, plain, message)
    message = message.replace(": Value error, ", ": ").replace(". Choose from:", ", one of").replace(". Did", "; did")
    command = error.ctx.command_path if error.ctx else _named_command()
    see = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{see} {command} --help"


def _unknown_option(error: Any) -> str:
    """Name an unknown option with the option or the recipe key that was probably meant."""
    option, similar = error.option_name, sorted(error.possibilities or ())
    hint = hint_for_option(option, sys.argv[1:], similar) if _takes_assignments(error.ctx) else None
    meant = hint or nearest(option, similar)
    return f"no such option: {option}" + (f"; did you mean {meant}?" if meant else "")


def _named_command() -> str:
    """Return the sub-command that the arguments name; an option without its value is found before it is known."""
    known = [command.name for command in app.registered_commands]
    return " ".join(["atas", *(name for name in sys.argv[1:2] if name in known)])


def _takes_assignments(context: Any) -> bool:
    """Return whether the command has the option --set."""
    return context is not None and any("--set" in parameter.opts for parameter in context.command.params)


def _fail(sentence: str, status: int, *, on_all_ranks: bool) -> None:
    """Print a sentence and exit. Rank 0 alone prints an error that all ranks have."""
    if on_all_ranks and not is_rank0():
        sys.exit(status)
    try:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        with console.capture() as captured:
            console.print("[bold red]atas:[/]", end=" ")
        prefix = captured.get()
    except (ImportError, MemoryError, OSError):  # out of memory or of files, which the sentence says
        prefix = "atas: "
    sys.stderr.write(f"{prefix}{printable(sentence)}\n")  # at once: torchrun puts a prefix before every write
    sys.exit(status)
