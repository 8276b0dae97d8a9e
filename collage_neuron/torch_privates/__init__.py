"""Every use of private names of torch and torch_xla in this project, by subject; no other file uses any.

Each entry says why no public name is enough. `tests/repository/test_torch_privates.py` checks that no other file
reaches into torch.
"""

from collage_neuron.torch_privates.distributed import *
from collage_neuron.torch_privates.modules import *
from collage_neuron.torch_privates.operations import *
from collage_neuron.torch_privates.optimizers import *
from collage_neuron.torch_privates.tensors import *
from collage_neuron.torch_privates.xla import *
