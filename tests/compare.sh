#!/usr/bin/env bash
# tests/compare.sh BUILD: comparisons with other people's software, installed by name into
# BUILD/venv: Hugging Face `tokenizers` (the same ids) and `transformers` (the same logits), and
# tools/torch_bench.py, the peer in PyTorch (the same logits, the same training), and
# tools/torch_twin.py, one update in float64; and `tensorboard` (the same numbers in a run's event
# files). Exit 77 when they cannot be had.
set -uo pipefail
build=$(realpath "$1")
python=$build/venv/bin/python
if ! "$python" -c 'import tokenizers, transformers, torch, safetensors, tensorboard, gguf' 2>/dev/null; then
  { python3 -m venv "$build/venv" && "$python" -m pip install -q tokenizers safetensors \
    transformers torch tensorboard gguf; } || { echo "transformers and torch cannot be installed"; exit 77; }
fi
set -e
bible -f 'gen1:1-gen30:43' </dev/null | sed -E 's/^[^ ]+ //' >"$build/compare.txt"
"$python" tests/tokenizers_compare.py "$build" --text "$build/compare.txt"
PG_PYTHON=$python "$build/tests/hf_test"
"$python" tests/tensorboard_compare.py "$build"
"$python" tests/torch_compare.py trajectory tests/golden/trajectory
tests/torch_twin.sh "$build" "$python" "$build/compare.txt"
