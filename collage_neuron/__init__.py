"""collage_neuron: train bf16 models on Trainium with the accuracy of fp32 master weights.

import collage_neuron

model, optimizer = collage_neuron.compile(model, optimizer)
"""

from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

# In a checkout, passes/ and kernels_nki/ sit beside this folder; in a wheel they sit inside it.
if not (Path(__file__).parent / "passes").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

from collage_neuron._version import __version__ as __version__

if TYPE_CHECKING:
    from collage_neuron.api import *  # noqa: F403  # for type checkers alone, which know each name by it
    from collage_neuron.api import __all__ as __all__
else:  # when a name is first read, since all of them need torch, which `--version` and `--help` do not wait for

    def __getattr__(name: str) -> object:
        """Imports the submodule of that name, or else finds it among the public names."""
        if PathFinder.find_spec(f"{__name__}.{name}", __path__):  # noqa: F405  # every module has it
            return import_module(f"{__name__}.{name}")
        public = import_module(f"{__name__}.api")
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(public, name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module(f"{__name__}.api").__all__})
