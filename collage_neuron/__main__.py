"""`python -m collage_neuron`: commands for the shell."""

from __future__ import annotations

import argparse
import sys

from collage_neuron.doctor import report


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m collage_neuron", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="a table of what this machine can run, and whether roundings survive on it")
    parser.parse_args(arguments)
    text, well = report()
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
