"""`python -m collage_neuron report RUN...`: turns logs of runs into one self-contained HTML page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from collage_neuron.cli.conclusion import conclusion, verdicts
from collage_neuron.cli.module_maps import picture as map_picture
from collage_neuron.cli.report_page import page
from collage_neuron.errors import LogError
from collage_neuron.monitoring.run_log import Log, read_logs

NEEDS = {"plotly": "the page"}
"""What needs a package of the extra `report`; the others are needed by `--map`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's .jsonl log, or a folder of them")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    add_map = "write the maps of EDQ by module as a picture too: .png, .svg or .pdf"
    parser.add_argument("--map", type=picture, metavar="FILE", help=add_map)


def picture(text: str) -> Path:
    """An argparse type: a file name with a picture format that matplotlib can write."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is not a picture: name a file that ends in .png, .svg or .pdf")
    return path


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Writes the page, and the picture; returns the exit status."""
    try:
        logs = read_logs(options.runs, lambda error: print(f"report: left out: {error}", file=sys.stderr))
        files = {options.out: page(logs).encode()}
        if options.map is not None:
            files[options.map] = _map(logs, options.map.suffix[1:])
        for path, content in files.items():
            _write(path, content)
            opened = ": open it in a browser" * (path == options.out)
            print(f"wrote {path} ({len(content) / 1e6:.1f} MB){opened}")
        print("\n".join(verdicts(logs)))
        print(conclusion(logs))
    except LogError as error:
        print(f"report: {error}{_of_compare(options.runs)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("plotly", "matplotlib", "numpy"):
            raise
        print(f"report: {NEEDS.get(missing, '--map')} needs {missing}; pip install '.[report]'", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"report: {error.filename} cannot be written ({error.strerror}); name another with --out or --map",
            file=sys.stderr,
        )
        return 2
    return 0


def _of_compare(given: Sequence[Path]) -> str:
    """What to say of folders that `compare` wrote."""
    pages = [path / "compare.html" for path in given if (path / "compare.html").is_file()]
    written = f"; the command compare writes a page of its own, here {pages[0]}" if pages else ""
    return f"{written}. A run writes a log with monitor(optimizer, model, to=JsonLog('runs/name.jsonl'))" * bool(pages)


def _map(logs: Sequence[Log], form: str) -> bytes:
    drawn = map_picture(logs, form)
    if drawn is None:
        raise LogError("no run logged its modules, so there is no map of them; leave out --map")
    return drawn


def _write(path: Path, content: bytes) -> None:
    """Writes the file atomically: on an error the old file stays."""
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        half.write_bytes(content)
        os.replace(half, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        half.unlink(missing_ok=True)
