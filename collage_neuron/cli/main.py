"""`collage_neuron COMMAND`, or `python -m collage_neuron COMMAND`: finds a command and runs it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from contextlib import suppress
from importlib import import_module, metadata

from collage_neuron._version import __version__

COMMANDS = {
    "doctor": "what this machine can run, and whether roundings survive on it",
    "compare": "which strategy a model needs: a script's training under several, as a table",
    "report": "what happened in runs: their logs as one page",
}
"""Commands and what each shows. A command is a file in this folder with `add_arguments(parser)` and
`main(options, rest)`.

The file is imported by name when the command is given, so that no command imports what another one needs.
"""

EXAMPLES = {
    "doctor": "collage_neuron doctor                    # first of all, on every machine; the last line is the verdict",
    "compare": """\
collage_neuron compare                               # a tiny built-in GPT, a minute
collage_neuron compare train.py                      # a script with the changed line, as it is
collage_neuron compare train.py --seeds 0 1 2 -- --seed {seed}     # and a recommendation""",
    "report": """\
collage_neuron report runs                           # a folder of logs: writes report.html
A log is written by monitor(optimizer, model, to=JsonLog("runs/name.jsonl")).""",
}

DESCRIPTION = """\
collage_neuron trains models in bf16 without losing the small updates: it compiles a torch optimizer so that parameters
and states keep what bf16 rounds away. `collage_neuron.compile` is all that a script needs. These commands help to
choose and to check."""

START = "Begin with `collage_neuron doctor`; `collage_neuron COMMAND --help` has the options and an example."


def versions() -> str:
    """The versions of this package and of what it runs on, without importing that: torch takes seconds."""
    on = [f"Python {platform.python_version()}"]
    for name in ("torch", "torch_xla"):
        with suppress(metadata.PackageNotFoundError):
            on.append(f"{name} {metadata.version(name)}")
    return f"collage_neuron {__version__} ({', '.join(on)})"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="collage_neuron", description=DESCRIPTION, epilog=START)
    parser.add_argument("--version", action="store_true", help="show the versions of this package, Python and torch")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=text,
            description=f"Shows {text}.",
            epilog=EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # Only the command that was given is imported: the options of others would take torch, two seconds.
        if given[:1] == [name]:
            command = import_module(f"collage_neuron.cli.{name}")
            command.add_arguments(subparser)
    # What follows -- is of the script, and argparse would look for options of ours in it.
    end = given.index("--") if given[:1] == ["compare"] and "--" in given else len(given)
    options = parser.parse_args(given[:end])
    if options.version:
        print(versions())
        return 0
    if options.command is None:
        parser.print_help()
        return 2
    try:
        status: int = command.main(options, given[end + 1 :])
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has read enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 1
    return status
