"""Import every module of the installed wheel and run its doctests.

Run from an empty directory: python smoke_installed.py WHERE_THE_WHEEL_IS_INSTALLED
"""

import doctest
import importlib
import pkgutil
import sys

import collage_neuron

NEURON_ONLY = {"nki", "neuronxcc", "torch_neuronx"}


def main() -> None:
    location = str(collage_neuron.__file__)
    if not location.startswith(sys.argv[1]):
        sys.exit(f"imported {location}, not the wheel in {sys.argv[1]}")
    modules = doctests = 0
    found = [info.name for info in pkgutil.walk_packages(collage_neuron.__path__, "collage_neuron.")]
    for name in ["collage_neuron", *found]:
        if name.endswith(".__main__"):  # the doctor: runs when imported, and on its own right after this
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in NEURON_ONLY:
                raise
            print(f"   {name}: left out, it needs {error.name}")
            continue
        failed, attempted = doctest.testmod(module)
        if failed:
            sys.exit(f"{name}: {failed} of {attempted} doctests fail")
        modules, doctests = modules + 1, doctests + attempted
    print(f"   {modules} modules imported, {doctests} doctests passed")


main()
