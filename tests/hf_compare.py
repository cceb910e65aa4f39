#!/usr/bin/env python3
"""Compare a checkpoint's logits with Hugging Face's Qwen3ForCausalLM in fp32.

usage: hf_compare.py CHECKPOINT LOGITS.json [BAR]

LOGITS.json holds {"tokens": [T ids], "logits": [T][V]} as Perigee computed them. Prints the worst
relative error ||ours - theirs|| / ||theirs|| over all positions and the largest difference. Exit
codes: 0 within BAR (default 1e-5: roundings of two fp32 passes and fp32 angles up to 64 positions),
1 not, 77 transformers or torch is not installed.
"""
import json
import sys

try:
    import torch
    import transformers
except ImportError as reason:
    print(f"skipped: {reason}")
    sys.exit(77)


def main():
    folder, logits_path = sys.argv[1:3]
    bar = float(sys.argv[3]) if len(sys.argv) > 3 else 1e-5
    torch.set_num_threads(1)
    with open(logits_path) as file:
        ours = json.load(file)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == ["Qwen3ForCausalLM"], config.architectures
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[kind], (kind, loading[kind])
    assert type(model).__name__ == "Qwen3ForCausalLM", type(model)
    model.eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ours["tokens"]])).logits[0].double()
    got = torch.tensor(ours["logits"], dtype=torch.float64)
    assert got.shape == theirs.shape, (got.shape, theirs.shape)
    difference = got - theirs
    relative = (difference.norm() / theirs.norm()).item()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: "
          f"{theirs.shape[0]} positions, {theirs.shape[1]} tokens: relative error {relative:.3g}, "
          f"largest difference {difference.abs().max().item():.3g} of "
          f"{theirs.abs().max().item():.3g} (bar {bar:g})")
    sys.exit(0 if relative <= bar else 1)


main()
