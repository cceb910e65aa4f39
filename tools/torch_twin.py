#!/usr/bin/env python3
"""One update of Perigee, written again in PyTorch, plainly and in float64, and compared.

usage: perigee run tools/torch_twin.lua RECIPE FOLDER UPDATE [name=value …]
       torch_twin.py FOLDER

From the checkpoint before the update: the batch is read from the shards in the loader's order, the
loss and its gradients come from the model below by autograd, then norm, clip, every parameter's
increment (AdamW, Muon, RowNorm) and the new weights and slots. Each is held against what Perigee
saved. Increments are made from Perigee's own gradient and slots, so that each bar below is that of
one step and an error of the gradient is not seen twice.

Bars, relative, ||a - b||_F / ||b||_F of a parameter, u = 2^-24 the rounding of fp32:
  loss 1e-6, norm 5e-6: Perigee's own, measured against float64 on the golden trajectory.
  gradient 1e-5: that of Perigee's kernels against each other. A chain of some 10 operations per
    block and direction, each within a few u of its operands' norm, adds to about 30 u per block
    where errors add up and to 30 u / sqrt(blocks) where they are independent.
  AdamW, RowNorm 1e-6: each entry is the end of at most 10 roundings (10 u = 6e-7), the norm of a
    row adds its sum, which is pairwise or in several lanes.
  Muon 4e-5: a Newton-Schulz step multiplies errors in the direction of small singular values by at
    most 3.4445, so that u·c of each of five steps becomes u·c·(1 + 3.4445 + ... + 3.4445^4) = 200
    u·c, and c, the error of three products of unit norm, is about 3.
  slots, new weights 3e-7: one or two products and a sum, 3 u with a margin of 1.7.

Exit codes: 0 agrees, 1 does not, 77 torch, numpy or safetensors is not installed.
"""
import fnmatch
import json
import math
import pathlib
import sys

try:
    import numpy
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file
except ImportError as reason:
    print(f"skipped: {reason}")
    sys.exit(77)

BARS = {"loss": 1e-6, "norm": 5e-6, "gradient": 1e-5, "adamw": 1e-6, "rownorm": 1e-6,
        "muon": 4e-5, "slot": 3e-7, "weight": 3e-7}


def shuffled(count, *entropy):
    order = numpy.arange(count)
    bits = numpy.random.PCG64(numpy.random.SeedSequence(entropy))
    numpy.random.Generator(bits).shuffle(order)
    return order


def batches(folder, length, group, seed, pattern="*_train_*.bin"):
    """Optimizer batches in the order of the loader, as (inputs, targets): shards shuffled per
    epoch, groups of consecutive sequences shuffled within a shard."""
    names = sorted(path.name for path in folder.iterdir() if fnmatch.fnmatch(path.name, pattern))
    shards = [torch.from_numpy(numpy.fromfile(folder / name, "<u2", offset=1024).astype("int64"))
              for name in names]
    epoch = 0
    while True:
        for i in shuffled(len(shards), seed, epoch, 0):
            tokens = shards[i]
            for g in shuffled((len(tokens) - 1) // length // group, seed, epoch, int(i), 1):
                text = tokens[g * group * length:(g + 1) * group * length + 1]
                yield text[:-1].view(group, length), text[1:].view(group, length)
        epoch += 1


# ---- the model: SPEC.md section 1 ------------------------------------------------------------

def norm(x, eps):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def rotate(x, base):
    """RoPE, half-split, on [batch, heads, T, head_dim]."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), frequency)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angle.cos() - right * angle.sin(),
                      right * angle.cos() + left * angle.sin()), -1)


def mean_loss(w, c, tokens, targets):
    """Mean cross entropy of weights w (Hugging Face's names), c: the checkpoint's config.json."""
    batch, length = tokens.shape
    heads, head_dim, eps = c["num_attention_heads"], c["head_dim"], c["rms_norm_eps"]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        def project(y, name):
            return y @ w[f"model.layers.{i}.{name}_proj.weight"].T

        def split(y):
            return y.view(batch, length, heads, head_dim).transpose(1, 2)
        y = norm(x, eps)
        q = rotate(norm(split(project(y, "self_attn.q")), eps), c["rope_theta"])
        k = rotate(norm(split(project(y, "self_attn.k")), eps), c["rope_theta"])
        scores = (q @ k.mT / math.sqrt(head_dim)).masked_fill(future, -math.inf)
        y = scores.softmax(-1) @ split(project(y, "self_attn.v"))
        x = x + project(y.transpose(1, 2).reshape(batch, length, -1), "self_attn.o")
        y = norm(x, eps)
        x = x + project(F.silu(project(y, "mlp.gate")) * project(y, "mlp.up"), "mlp.down")
    logits = norm(x, eps) @ w["lm_head.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- the optimizers: SPEC.md section 3. Each returns the increment and the new slots. ---------

def adamw(g, slots, h, lr, n):
    b1, b2 = h["betas"]
    m = b1 * slots["m"] + (1 - b1) * g
    v = b2 * slots["v"] + (1 - b2) * g * g
    return -lr * (m / (1 - b1 ** n)) / ((v / (1 - b2 ** n)).sqrt() + h["eps"]), {"m": m, "v": v}


def muon(g, slots, h, lr, n):
    plain = {"average": "sum", "coefficients": "quintic", "scale": "spectral", "heads": 1}
    for name, value in plain.items():
        if h[name] != value:
            sys.exit(f"torch_twin: muon's {name} = {h[name]}: the twin has {value} only")
    b = h["momentum"] * slots["momentum"] + g
    x = g + h["momentum"] * b if h["nesterov"] else b
    rows, columns = g.shape
    x = x.T if rows > columns else x
    x = x / (x.norm() + h["eps"])
    for _ in range(h["steps"]):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if rows > columns else x
    return -lr * math.sqrt(max(1, rows / columns)) * x, {"momentum": b}


def rownorm(g, slots, h, lr, n):
    if h["project"] != "none" or h["diameter_budget"] != 0 or h["axis"] != "rows":
        sys.exit("torch_twin: rownorm without its options only")
    b = h["beta"] * slots["momentum"] + (1 - h["beta"]) * g
    corrected = b / -math.expm1(n * math.log(h["beta"]))
    length = corrected.norm(dim=1, keepdim=True)
    return -lr * corrected / (length + h["eps"]), {"momentum": b}


OPTIMIZERS = {"adamw": adamw, "muon": muon, "rownorm": rownorm}


class Judge:
    """Collects the worst relative error of each kind."""

    def __init__(self):
        self.worst = {}

    def see(self, kind, name, got, wanted):
        if isinstance(wanted, torch.Tensor):
            size = wanted.norm().item()
            error = (got.double() - wanted).norm().item()
        else:
            size, error = abs(wanted), abs(got - wanted)
        error = error / size if size > 0 else (0.0 if error == 0 else math.inf)
        if not error <= self.worst.get(kind, (-1.0,))[0]:  # a NaN as well
            self.worst[kind] = (error, name)

    def verdict(self):
        fine = True
        for kind, (error, name) in self.worst.items():
            good = error <= BARS[kind]
            fine = fine and good
            print(f"torch_twin: {kind:<9} {error:.2g} (bar {BARS[kind]:g}) at {name}: "
                  f"{'ok' if good else 'WRONG'}")
        return fine


def doubles(path):
    return {name: tensor.double() for name, tensor in load_file(path).items()}


def compare(folder):
    with open(folder / "twin.json") as file:
        told = json.load(file)
    before, after = folder / told["before"], folder / told["after"]
    with open(before / "config.json") as file:
        config = json.load(file)
    weights, new_weights = (doubles(f / "model.safetensors") for f in (before, after))
    slots, new_slots = (doubles(f / "optimizer.safetensors") for f in (before, after))
    gradients = doubles(folder / "gradients.safetensors")
    increments = doubles(after / "increment.safetensors")
    judge = Judge()

    order = batches(pathlib.Path(told["data"]), told["context"], told["sequences"],
                    told["data_seed"], told["train"])
    for _ in range(told["update"]):
        tokens, targets = next(order)
    trained = {p["name"]: weights[p["name"]].requires_grad_()
               for p in told["parameters"] if p["optimizer"] != "frozen"}
    # A sequence at a time: the attention of all at once would take memory by the square of T.
    loss = 0.0
    for one, target in zip(tokens, targets):
        part = mean_loss(weights, config, one[None], target[None]) / len(tokens)
        part.backward()
        loss += part.item()
    judge.see("loss", "the batch", told["loss"], loss)
    total = math.sqrt(sum(w.grad.square().sum().item() for w in trained.values()))
    judge.see("norm", "all gradients", told["grad_norm"], total)
    factor = 1.0 if told["clip"] is None else min(1.0, told["clip"] / (total + 1e-6))
    judge.see("norm", "the clip factor", told["clip_factor"], factor)

    with torch.no_grad():
        for p in told["parameters"]:
            name, kind, h = p["name"], p["optimizer"], p["hypers"]
            if kind == "frozen":
                judge.see("weight", name, new_weights[name], weights[name])
                continue
            if kind not in OPTIMIZERS:
                sys.exit(f"torch_twin: {name}: there is no twin of {kind}")
            judge.see("gradient", name, gradients[name], trained[name].grad * factor)
            mine = {key[len(name) + 1:]: value for key, value in slots.items()
                    if key.startswith(name + ".")}
            lr = h["lr"] * p["scale"]
            step, made = OPTIMIZERS[kind](gradients[name], mine, h, lr, p["updates"])
            judge.see(kind, name, increments[name], step)
            for slot, value in made.items():
                judge.see("slot", f"{name}.{slot}", new_slots[f"{name}.{slot}"], value)
            decayed = (1 - lr * h["weight_decay"]) * weights[name]
            judge.see("weight", name, new_weights[name], decayed + increments[name])
    return judge.verdict()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.split("\n\n")[1])
    sys.exit(0 if compare(pathlib.Path(sys.argv[1])) else 1)
