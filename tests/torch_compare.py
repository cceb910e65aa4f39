#!/usr/bin/env python3
"""Does tools/torch_bench.py compute what Perigee computes?

usage: torch_compare.py logits CHECKPOINT LOGITS.json [BAR]
       torch_compare.py trajectory GOLDEN_FOLDER

logits: those of a checkpoint in fp32, against what Perigee computed ({"tokens": [T ids],
"logits": [T][V]}); BAR is the relative error that is allowed. trajectory: the whole golden
trajectory, 40 updates with both heads, eager in one micro-batch and compiled in two, within
Perigee's own bars: loss and gradient norm 1e-6 and 5e-6 in fp32, 6e-4 and 2e-2 in bf16. Exit codes:
0 agrees, 1 does not, 77 torch, numpy or safetensors is not installed.
"""
import json
import math
import pathlib
import sys
import types

try:
    import torch
    from safetensors.torch import load_file
except ImportError as reason:
    print(f"skipped: {reason}")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
import torch_bench  # noqa: E402
from torch_twin import batches  # noqa: E402


def compare_logits(folder, logits_path, bar="1e-5"):
    with open(f"{folder}/config.json") as file:
        c = json.load(file)
    with open(logits_path) as file:
        ours = json.load(file)
    sizes = types.SimpleNamespace(
        layers=c["num_hidden_layers"], width=c["hidden_size"], heads=c["num_attention_heads"],
        head_dim=c["head_dim"], mlp=c["intermediate_size"], vocab=c["vocab_size"],
        context=len(ours["tokens"]), norm_eps=c["rms_norm_eps"], rope_base=c["rope_theta"])
    model = torch_bench.Model(sizes, torch.float32)
    model.load(load_file(f"{folder}/model.safetensors"))
    with torch.no_grad():
        theirs = model.logits(model.hidden(torch.tensor([ours["tokens"]])))[0].double()
    got = torch.tensor(ours["logits"], dtype=torch.float64)
    relative = ((got - theirs).norm() / theirs.norm()).item()
    print(f"torch_bench: {got.shape[0]} positions, {got.shape[1]} tokens: relative error "
          f"{relative:.3g} (bar {float(bar):g})")
    return relative <= float(bar)


def schedule(t, total, warmup, floor):
    if t < warmup:
        return t / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1, (t - warmup) /
                                                                 (total - warmup - 1))))


def follow_trajectory(folder, head, compute, compiled, micro):
    """Worst relative errors of loss and gradient norm."""
    with open(folder / "expected.json") as file:
        expected = json.load(file)
    m, c = expected["model"], expected["config"]
    sizes = types.SimpleNamespace(
        layers=m["layers"], width=m["d"], heads=m["heads"], head_dim=m["d"] // m["heads"],
        mlp=m["mlp"], vocab=m["V"], context=c["T"], norm_eps=m["norm_eps"],
        rope_base=m["rope_theta"])
    trainer = torch_bench.Trainer(sizes, torch.device("cpu"), compute, head, compiled, c["clip"])
    trainer.model.load(load_file(folder / "init.safetensors"))
    data = batches(folder, c["T"], c["global_batch"], c["seed"])
    worst = [0.0, 0.0]
    for t, update in enumerate(expected["runs"][head]):
        inputs, targets = next(data)
        got = trainer.update(inputs, targets, micro,
                             schedule(t, c["steps"], int(c["warmup"] * c["steps"]), c["floor"]))
        for i, name in enumerate(("loss", "grad_norm")):
            worst[i] = max(worst[i], abs(float(got[i]) - update[name]) / update[name])
    bars = (1e-6, 5e-6) if compute == "fp32" else (6e-4, 2e-2)
    fine = worst[0] <= bars[0] and worst[1] <= bars[1]
    print(f"torch_bench, {head} head, {compute}, {'compiled' if compiled else 'eager'}, "
          f"micro-batch {micro}: loss {worst[0]:.2g}, gradient norm {worst[1]:.2g}: "
          f"{'ok' if fine else 'WRONG'}")
    return fine


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "logits":
        return compare_logits(*sys.argv[2:])
    folder = pathlib.Path(sys.argv[2])
    return all([follow_trajectory(folder, "adamw", "fp32", False, 8),
                follow_trajectory(folder, "rownorm", "fp32", False, 8),
                follow_trajectory(folder, "rownorm", "fp32", True, 4),
                follow_trajectory(folder, "rownorm", "bf16", False, 8)])


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
