#!/usr/bin/env bash
# On a trn1 instance: check the machine, ask it what the documentation leaves open, then train the demo's GPT in bf16
# and in compensated bf16 and compare. docs/trn1.md says what must be installed.
#
#   examples/trn1_pretrain.sh                 # all results in out/
#   OUT=results examples/trn1_pretrain.sh --steps 300 --strategies bf16 plus      # options go to pretrain.py
#   PROBE="--only rounding generated" examples/trn1_pretrain.sh                   # options of device_probe.py
#
# Evidence: no device. tests/repository/test_trn1_script.py runs it on the stand-in, with XLA's CPU as the core, where
# DEVICE_FILES names another file in the place of /dev/neuron*.
set -euo pipefail

cd "$(dirname "$0")/.."
out=${OUT:-out}
python=${PYTHON:-python}
read -ra probe <<<"${PROBE:-}"

fail() {
    echo "trn1_pretrain.sh: $*" >&2
    exit 1
}

compgen -G "${DEVICE_FILES:-/dev/neuron*}" >/dev/null ||
    fail "no /dev/neuron*: run it on a trn1 instance, in a container with --device=/dev/neuron0"
"$python" -c 'import torch_xla, libneuronxla' 2>/dev/null ||
    fail "$python has no torch_xla with libneuronxla: activate the Neuron PyTorch environment, or set PYTHON"

# Roundings to nearest even, and no casts that the program did not write; one of the two cores.
export NEURON_RT_STOCHASTIC_ROUNDING_EN=0
export NEURON_CC_FLAGS=${NEURON_CC_FLAGS:---auto-cast=none}
export NEURON_RT_NUM_CORES=${NEURON_RT_NUM_CORES:-1}
mkdir -p "$out"

echo "== doctor: packages, settings, and whether a rounding is lost"
"$python" -m collage_neuron doctor

echo "== probe: what the documentation leaves open (the compiler takes seconds to a minute for each question)"
"$python" examples/device_probe.py --out "$out/device_probe.json" "${probe[@]}"

echo "== pretrain: the first steps of each strategy compile"
"$python" examples/pretrain.py --device xla --out "$out" "$@"

echo "== done: $out/device_probe.json, $out/pretrain.json, $out/pretrain.png"
