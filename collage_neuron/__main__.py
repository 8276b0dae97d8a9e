"""Entry point of `python -m collage_neuron` (see `cli/main.py`)."""

import sys

from collage_neuron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
