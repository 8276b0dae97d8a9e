"""`python -m collage_neuron`: commands for the shell (`cli/main.py`)."""

import sys

from collage_neuron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
