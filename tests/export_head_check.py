#!/usr/bin/env python3
"""Export the head of a tiny random model by tools/export_head.py; print the model's own mean loss.

usage: export_head_check.py OUT.safetensors

Exit code 77 where torch, transformers or safetensors is not installed.
"""
import os
import sys

try:
    import torch
    import transformers
    import safetensors.torch  # noqa: F401
except ImportError as reason:
    print(f"skipped: {reason}")
    sys.exit(77)

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tools"))
from export_head import export  # noqa: E402


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=97, n_positions=64, n_embd=18, n_layer=1, n_head=3))
    tokens = torch.arange(38) ** 2 % 97
    export(model, tokens, sys.argv[1])
    with torch.no_grad():
        logits = model(tokens[None, :-1]).logits[0].double()
    print(repr(torch.nn.functional.cross_entropy(logits, tokens[1:]).item()))


if __name__ == "__main__":
    main()
