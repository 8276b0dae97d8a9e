"""`collage_neuron COMMAND`, or `python -m collage_neuron COMMAND`: finds a command and runs it."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from collage_neuron._version import __version__

COMMANDS = {
    "doctor": "a table of what this machine can run, and whether roundings survive on it",
    "kernels": "the generated kernels of common optimizers: list, write, check, and what they cost",
    "compare": "a script's model under several strategies, from the same seed, as a table",
    "passes": "the update of an optimizer after each pass of the compiler",
    "report": "logs of runs as one HTML page: loss, EDQ by module, lost updates, stalls",
}
"""Commands and their help texts. A command is a file in this folder with `add_arguments(parser)` and
`main(options, rest)`.

The file is imported by name when the command is given, so that no command imports what another one needs.
"""

DESCRIPTION = "What this machine can run, what the compiler makes of an optimizer, and what precision costs a training."


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="collage_neuron", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"collage_neuron {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        options = commands.add_parser(name, help=text)
        if given[:1] == [name]:
            command = import_module(f"collage_neuron.cli.{name}")
            command.add_arguments(options)
    end = given.index("--") if given[:1] == ["compare"] and "--" in given else len(given)
    found = parser.parse_args(given[:end])
    try:
        status: int = command.main(found, given[end + 1 :])
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has read enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 1
    return status
