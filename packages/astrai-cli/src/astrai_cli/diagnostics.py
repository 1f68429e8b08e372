"""What a user sees on stderr: one line per failure, one per warning, and a traceback only with ``--debug``."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from types import TracebackType

import rich_click as click

DEBUG = "astrai_cli.debug"
"""Key of ``Context.meta`` that is set by ``--debug``."""

_WRITE_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def failure(error: Exception) -> click.ClickException:
    """Return the click exception for an error raised on purpose or by the system; its exit code is 1.

    Click's own exceptions are returned as they are.
    """
    if isinstance(error, click.ClickException):
        return error
    if isinstance(error, OSError) and error.strerror:
        if error.errno in _WRITE_ERRORS and error.filename is None:
            _discard_stdout()
            return click.ClickException(f"standard output: cannot write: {error.strerror}; free some space")
        where = f"{error.filename}: " if error.filename else ""
        return click.ClickException(f"{where}{error.strerror}")
    return click.ClickException(str(error))


def print_failure(error: click.ClickException) -> None:
    """Print ``error: ...`` in one line; for wrong usage with the command that explains it."""
    message = " ".join(error.format_message().split())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = f"{message[:1].lower()}{message[1:].rstrip('.')} (see {error.ctx.command_path} --help)"
    click.echo(f"{click.style('error:', fg='red', bold=True)} {message}", err=True)


def warn(message: str) -> None:
    """Print ``warning: ...`` in one line."""
    click.echo(f"{click.style('warning:', fg='yellow', bold=True)} {message}", err=True)


def set_up() -> None:
    """Prepare this process for a user: no tracebacks, no library's noise, no character that cannot be printed."""
    sys.excepthook = _report_unexpected
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    logging.getLogger().addHandler(_OneLineHandler(logging.WARNING))
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def enable_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Do what ``--debug`` asks for: tracebacks, all warnings and log records."""
    if not value or DEBUG in ctx.meta:
        return
    ctx.meta[DEBUG] = True
    sys.excepthook = sys.__excepthook__
    warnings.simplefilter("default")
    logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s", force=True)


class _OneLineHandler(logging.Handler):
    """Shows the warnings of astrai's packages. A record with an exception is left out: the exception is reported."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("astrai_") and not record.exc_info:
            warn(" ".join(record.getMessage().split()))


def _report_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return  # the interpreter ends the process by the signal itself
    first_line = str(error).partition("\n")[0]
    print_failure(click.ClickException(f"{kind.__name__}: {first_line} (run with --debug for the traceback)"))


def _discard_stdout() -> None:
    """Point stdout at nothing: what could not be written would fail again when the interpreter exits."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # no file of the system
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
