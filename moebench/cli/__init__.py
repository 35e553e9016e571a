"""The command line: one verb a file, imported only when it is called, so that `moebench --help` stays instant."""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from moebench.garbage import end_without_looking, look_seldom
from moebench.workloads.errors import InputError

# Verb -> its one line of help. The verb lives in moebench/cli/<verb>.py as `command`.
VERBS = {
    "run": "Run a suite, judge the paper's claims, write the report.",
    "plan": "Which parallel setting trains a model fastest on a cluster, and why not the others.",
    "launch": "How to start a suite on a real cluster: torchrun and sbatch lines.",
    "claims": "Scoreboard: what was reported, what was obtained, the verdict and why.",
    "list": "What there is: suites, systems, gates, kernels, models, topologies, hardware, claims, ...",
    "report": "Write the HTML report of a run.",
    "figures": "Redraw a paper's figures for print: reported beside obtained.",
    "explain": "Where the time of a case goes, or why one case beats another.",
    "compare": "What changed from one run to another, and whether it counts.",
    "check": "The same, against a baseline.",
    "accept": "Make a run the baseline that later ones are checked against.",
    "trend": "Where the numbers of many runs changed, and in which commits.",
    "index": "One page over many runs: trends, changes, a line a run with its report.",
    "trace": "The timeline of a case, for Perfetto.",
    "export": "Rows of a run as nccl-tests, Perfetto, CSV or Markdown.",
    "calibrate": "Measure this machine into a hardware file.",
    "validate": "Check suites, topologies, hardware, models, routings, reported numbers, run folders.",
    "import": "A model's config.json, or logs of nccl-tests, into files that suites can name.",
    "record-routing": "What a router says of each token, into a file that suites can impose.",
    "new-system": "Write a package for a system of your own that passes its tests as it is.",
    "doctor": "What this machine can run and what is missing.",
}
_FILES = {"list": "list_", "new-system": "new_system", "import": "import_", "record-routing": "record_routing"}
_CLOSED_PIPE = 141  # 128 + SIGPIPE, what a shell shows for any other program
_MOST_CHARACTERS = 4000  # of an error: a file may hold a key of ten million
_NO_ROOM = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)


def _shortened(text: str) -> str:
    """The start and the end of what is too long for any terminal."""
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"


class _ClosedPipe(Exception):
    """The reader of the output has gone: `moebench list topologies | head -1`."""


class Verbs(click.Group):
    """A group that knows its verbs by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Verbs in the order of VERBS."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, or None where there is no such verb."""
        if cmd_name not in VERBS:
            return None
        return import_module(f"moebench.cli.{_FILES.get(cmd_name, cmd_name)}").command

    def invoke(self, ctx: click.Context) -> Any:
        """The verb's answer; a closed pipe, which click would turn into status 1, is told apart."""
        try:
            status = super().invoke(ctx)
            sys.stdout.flush()
            return status
        except BrokenPipeError as error:
            raise _ClosedPipe from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of verbs, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="moebench")
@click.option(
    "--workloads", multiple=True, metavar="DIR",
    help="Find suites, topologies, hardware, models and reported numbers of your own by name in this folder, too.",
)  # fmt: skip
@click.pass_context
def group(context: click.Context, workloads: tuple[str, ...]) -> None:
    """Is a Mixture-of-Experts systems paper right, where, and why?"""
    if workloads:
        from moebench.workloads import places

        before = os.environ.get(places.VARIABLE)
        context.call_on_close(lambda: _set(places.VARIABLE, before))
        folders = [Path(name).expanduser().absolute() for name in workloads]
        for folder in folders:
            places.check_user_folder(folder, "--workloads")
        _set(places.VARIABLE, os.pathsep.join([*map(str, folders), *filter(None, [before])]))


def _set(variable: str, value: str | None) -> None:
    """An environment variable, for this process and those that it starts."""
    os.environ.pop(variable, None)
    if value is not None:
        os.environ[variable] = value


def _open_closed_streams() -> None:
    """Where the caller closed a standard stream, Python has None: nothing that is written there is kept."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `moebench`: bad input is one line on standard error and exit status 2."""
    _open_closed_streams()
    if arguments is None:  # the process is this command's
        look_seldom()
        end_without_looking()
    try:
        status = group.main(
            args=None if arguments is None else list(arguments), prog_name="moebench", standalone_mode=False
        )
    except InputError as error:
        click.echo(f"moebench: {_shortened(str(error))}", err=True)
        sys.exit(2)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"moebench: {error.format_message()}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt) as stop:
        if isinstance(stop.__cause__, EOFError):  # nothing here asks for input: it is a fault, which click hides
            raise stop.__cause__ from None
        from moebench.stopping import exit_status

        click.echo("moebench: stopped", err=True)
        sys.exit(exit_status(stop.__cause__ or stop))
    except (_ClosedPipe, OSError) as error:
        if isinstance(error, OSError) and (error.filename is not None or error.errno not in _NO_ROOM):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of the output has nowhere to go at exit
        if isinstance(error, _ClosedPipe):
            sys.exit(_CLOSED_PIPE)
        click.echo(f"moebench: standard output: can't write: {error.strerror}", err=True)
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)
