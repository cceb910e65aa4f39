#!/usr/bin/env python3
"""The same training updates as `perigee bench`, in PyTorch: the peer that Perigee is compared with.

One update is forward and backward over all micro-batches, clipping, Muon on the blocks' matrices,
fused AdamW on the embedding, and RowNorm or fused AdamW on the head: the function, the optimizers
and the numbers that Perigee computes (tests/torch_compare.py proves it), written the way that is
fast here: one product for q, k and v, one for gate and up, SDPA, a padded vocabulary, batched
Newton-Schulz over equal shapes. In bf16 (autocast) the residual stream is bf16 and weights,
gradients and optimizer state are fp32. torch.compile works block by block: the blocks share one
compilation, which takes seconds where the whole model takes minutes.

Prints a line per mode, or with --json one object on standard output.
"""
import argparse
import gc
import json
import math
import platform
import resource
import statistics
import sys
import time

import torch
import torch.nn.functional as F

SIZES = ("layers", "width", "heads", "head_dim", "mlp", "vocab", "context")
PRESETS = {name: (32, width, heads, 64, None, 50257, 2048)  # mlp None: 4 width
           for name, width, heads in (("190m", 512, 8), ("380m", 768, 12), ("640m", 1024, 16))}


def norm(x, eps):
    """RMSNorm without gains over the last dimension, computed in fp32."""
    return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


def rotate(x, cos, sin):
    """RoPE on [..., T, heads..., head_dim], half-split, in fp32."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Block(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.heads, self.head_dim, self.eps = sizes.heads, sizes.head_dim, sizes.norm_eps
        inner = sizes.heads * sizes.head_dim
        self.qkv = torch.nn.Parameter(torch.empty(3, inner, sizes.width))
        self.out = torch.nn.Parameter(torch.empty(sizes.width, inner))
        self.gate_up = torch.nn.Parameter(torch.empty(2, sizes.mlp, sizes.width))
        self.down = torch.nn.Parameter(torch.empty(sizes.width, sizes.mlp))

    def matrices(self):
        """What Muon treats as one matrix each, as (parameter, index of the slice or None)."""
        return [(self.qkv, 0), (self.qkv, 1), (self.qkv, 2), (self.out, None),
                (self.gate_up, 0), (self.gate_up, 1), (self.down, None)]

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        qkv = F.linear(norm(x, self.eps), self.qkv.flatten(0, 1))
        qkv = qkv.view(batch, length, 3, self.heads, self.head_dim)
        q, k = rotate(norm(qkv[:, :, :2], self.eps), cos, sin).transpose(1, 3).unbind(2)
        v = qkv[:, :, 2].transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).flatten(2), self.out)
        gate, up = F.linear(norm(x, self.eps), self.gate_up.flatten(0, 1)).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Model(torch.nn.Module):
    def __init__(self, sizes, compute):
        super().__init__()
        self.sizes, self.compute = sizes, compute
        padded = (sizes.vocab + 63) // 64 * 64  # rows past the vocabulary stay zero
        self.embedding = torch.nn.Parameter(torch.empty(sizes.vocab, sizes.width))
        self.blocks = torch.nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head = torch.nn.Parameter(torch.zeros(padded, sizes.width))
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        with torch.no_grad():
            self.head[sizes.vocab:] = 0
        half = sizes.head_dim // 2
        inverse = sizes.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(sizes.context, dtype=torch.float64), inverse)
        # [T, 1, 1, head_dim / 2] against [batch, T, q or k, heads, head_dim / 2]
        self.register_buffer("cos", angle.cos().float()[:, None, None], persistent=False)
        self.register_buffer("sin", angle.sin().float()[:, None, None], persistent=False)

    def hidden(self, tokens):
        x = F.embedding(tokens, self.embedding).to(self.compute)
        cos, sin = self.cos[:tokens.shape[1]], self.sin[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return x

    def logits(self, x):
        return F.linear(norm(x, self.sizes.norm_eps), self.head)[..., :self.sizes.vocab].float()

    def loss(self, x, targets):
        return F.cross_entropy(self.logits(x).flatten(0, 1), targets.flatten())

    def forward(self, tokens, targets):
        return self.loss(self.hidden(tokens), targets)

    def compile_parts(self):
        for block in self.blocks:
            block.compile(dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)

    def load(self, weights):
        """Take weights with Hugging Face's names from a dictionary of tensors."""
        def put(to, name):
            to.copy_(weights[name])
        with torch.no_grad():
            put(self.embedding, "model.embed_tokens.weight")
            put(self.head[:self.sizes.vocab], "lm_head.weight")
            for i, block in enumerate(self.blocks):
                names = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate",
                         "mlp.up", "mlp.down")
                for (to, index), name in zip(block.matrices(), names):
                    put(to if index is None else to[index], f"model.layers.{i}.{name}_proj.weight")


def newton_schulz(x, eps, precision):
    """Five steps of Muon's quintic on a stack of matrices [n, rows, columns]."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + eps)).to(precision)
    for _ in range(5):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).float()


def muon_direction(momentum, gradient, mu, eps, precision):
    """B <- mu B + G, then the orthogonalised G + mu B."""
    momentum.mul_(mu).add_(gradient)
    return newton_schulz(gradient + mu * momentum, eps, precision)


class Muon:
    """Matrices of one shape are updated as one stack, scaled by sqrt(max(1, rows/columns))."""

    def __init__(self, matrices, precision, compiled, lr=8e-3, mu=0.95, eps=1e-5, decay=0.1):
        self.lr, self.mu, self.eps, self.decay, self.precision = lr, mu, eps, decay, precision
        self.direction = muon_direction
        if compiled:
            self.direction = torch.compile(muon_direction, dynamic=False)
        shapes = {}
        for matrix in matrices:
            shapes.setdefault(matrix[0].shape[-2:], []).append(matrix)
        self.groups = [(group, torch.zeros(len(group), *shape, device=group[0][0].device))
                       for shape, group in shapes.items()]

    @staticmethod
    def pick(tensors, group):
        return [t if i is None else t[i] for t, (_, i) in zip(tensors, group)]

    def step(self, scale):
        lr = self.lr * scale
        for group, momentum in self.groups:
            gradient = torch.stack(self.pick((p.grad for p, _ in group), group))
            direction = self.direction(momentum, gradient, self.mu, self.eps, self.precision)
            weights = self.pick((p.detach() for p, _ in group), group)
            rows, columns = weights[0].shape
            torch._foreach_mul_(weights, 1 - lr * self.decay)
            torch._foreach_add_(weights, list(direction.unbind(0)),
                                alpha=-lr * math.sqrt(max(1, rows / columns)))

    def newton_schulz_seconds(self, synchronize):
        """The share of Newton-Schulz in step."""
        times, run = [], newton_schulz
        if self.direction is not muon_direction:
            run = torch.compile(newton_schulz, dynamic=False)
        for _ in range(4):
            start = time.perf_counter()
            for _, momentum in self.groups:
                run(momentum, self.eps, self.precision)
            synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])


def rownorm_apply(weight, momentum, lr, guard):
    weight.sub_(lr * momentum / (torch.linalg.vector_norm(momentum, dim=1, keepdim=True) + guard))


class RowNorm:
    """eps (1 - beta^n) in the denominator is the bias correction of the momentum."""

    def __init__(self, weight, compiled, lr=3.2e-3, beta=0.95, eps=1e-8):
        self.weight, self.lr, self.beta, self.eps, self.updates = weight, lr, beta, eps, 0
        self.momentum = torch.zeros_like(weight)
        self.apply = torch.compile(rownorm_apply) if compiled else rownorm_apply

    def step(self, scale):
        self.updates += 1
        guard = -self.eps * math.expm1(self.updates * math.log(self.beta))
        numbers = [torch.tensor(x, dtype=torch.float32) for x in (self.lr * scale, guard)]
        self.momentum.lerp_(self.weight.grad, 1 - self.beta)
        self.apply(self.weight.detach(), self.momentum, *numbers)


class AdamW:
    def __init__(self, weight, lr=4e-3):
        self.lr = lr
        self.inner = torch.optim.AdamW([weight], lr=lr, betas=(0.9, 0.999), eps=1e-10,
                                       weight_decay=0.1, fused=True)

    def step(self, scale):
        self.inner.param_groups[0]["lr"] = self.lr * scale
        self.inner.step()


class Trainer:
    """A model, its optimizers and one whole update."""

    def __init__(self, sizes, device, compute="bf16", head="rownorm", compiled=False, clip=1.0,
                 newton_schulz_in="fp32"):
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        self.device, self.clip, self.compute = device, clip, dtypes[compute]
        with device:
            self.model = model = Model(sizes, self.compute)
        self.weights = list(model.parameters())
        matrices = [m for block in model.blocks for m in block.matrices()]
        self.muon = Muon(matrices, dtypes[newton_schulz_in], compiled)
        self.optimizers = [self.muon, AdamW(model.embedding),
                           RowNorm(model.head, compiled) if head == "rownorm"
                           else AdamW(model.head)]
        if compiled:
            model.compile_parts()

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16,
                              enabled=self.compute == torch.bfloat16)

    def update(self, tokens, targets, micro, scale=1.0):
        """tokens and targets [sequences, T] (host). Returns the loss and the gradient norm as
        device scalars."""
        total = 0
        parts = tokens.shape[0] // micro
        for m in range(parts):
            part = slice(m * micro, (m + 1) * micro)
            inputs = tokens[part].to(self.device, non_blocking=True)
            wanted = targets[part].to(self.device, non_blocking=True)
            with self.autocast():
                loss = self.model(inputs, wanted) / parts
            loss.backward()
            total = total + loss.detach()
        size = torch.nn.utils.clip_grad_norm_(self.weights, self.clip, foreach=True)
        with torch.no_grad():
            for optimizer in self.optimizers:
                optimizer.step(scale)
        for weight in self.weights:
            weight.grad = None
        return total, size


def measure(options, sizes, device, compiled):
    """Median of the timed updates, after updates that compile and warm up."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.manual_seed(0)
    start = time.perf_counter()
    trainer = Trainer(sizes, device, options.compute, options.head, compiled,
                      newton_schulz_in=options.newton_schulz)
    text = torch.randint(sizes.vocab, (options.sequences, sizes.context + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if device.type == "cuda":
        tokens, targets = tokens.pin_memory(), targets.pin_memory()

    def update():
        loss, _ = trainer.update(tokens, targets, options.micro)
        synchronize()
        return loss

    for _ in range(options.warmup):
        update()
    ready, times = time.perf_counter() - start, []
    while len(times) < options.updates and (not times or sum(times) < options.seconds):
        start = time.perf_counter()
        loss = update()
        times.append(time.perf_counter() - start)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = statistics.median(times)
    return {
        "name": "torch " + ("compiled" if compiled else "eager"),
        "compute": options.compute, "head": options.head,
        "sequences": options.sequences, "micro": options.micro, "updates": len(times),
        "seconds_per_update": seconds,
        "tokens_per_second": tokens.numel() / seconds,
        "peak_memory_bytes": peak,
        "parts": {"newton_schulz": trainer.muon.newton_schulz_seconds(synchronize)},
        "start_seconds": ready, "loss": float(loss),
    }


def attempt(options, sizes, device, compiled):
    """measure with the wanted micro-batch, or the largest half, quarter, … that fits."""
    wanted = options.micro
    while True:
        try:
            return measure(options, sizes, device, compiled)
        except torch.OutOfMemoryError:
            if options.micro == 1:
                raise
            options.micro = options.micro // 2
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            if compiled:
                torch.compiler.reset()
        print(f"torch_bench: out of memory, trying micro-batches of {options.micro} instead of "
              f"{wanted}", file=sys.stderr)


def parse(words=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's choice")
    p.add_argument("--compute", choices=("bf16", "fp32"), default="bf16")
    p.add_argument("--newton-schulz", choices=("bf16", "fp32"), default="fp32")
    p.add_argument("--head", choices=("rownorm", "adamw"), default="rownorm")
    p.add_argument("--eager", action="store_true", help="only without torch.compile")
    p.add_argument("--compile", action="store_true", help="only with torch.compile")
    p.add_argument("--json", action="store_true", help="one JSON object on standard output")
    p.add_argument("--model", choices=sorted(PRESETS),
                   help="a preset instead of the default, 8 layers of width 256, 4 heads, "
                   "vocabulary 50257, context 256; the next options change single sizes")
    for name in ("layers", "width", "heads", "head-dim", "mlp", "vocab", "context"):
        p.add_argument("--" + name, type=int)
    p.add_argument("--sequences", type=int, default=8, help="sequences of one update")
    p.add_argument("--micro", type=int, help="sequences at once; default: all")
    p.add_argument("--updates", type=int, default=3, help="timed updates, the median counts")
    p.add_argument("--warmup", type=int, default=1, help="updates before them")
    p.add_argument("--seconds", type=float, default=60, help="no timed update starts after these")
    options = p.parse_args(words)
    sizes = dict(zip(SIZES, PRESETS.get(options.model, (8, 256, 4, 64, None, 50257, 256))))
    for name, value in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.mlp = options.mlp or 4 * options.width
    options.norm_eps, options.rope_base = 1e-6, 1e4
    options.micro = options.micro or options.sequences
    if options.sequences % options.micro:
        p.error(f"--micro {options.micro}: a divisor of --sequences {options.sequences} is allowed")
    if options.head_dim % 2:
        p.error(f"--head-dim {options.head_dim}: an even number is allowed")
    return options


def main():
    options = parse()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch_bench: torch finds no GPU")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("highest")  # no TF32, as Perigee's fp32
    inner = options.heads * options.head_dim
    backbone = options.layers * (4 * options.width * inner + 3 * options.width * options.mlp)
    head = options.vocab * options.width
    result = {
        "torch": torch.__version__, "device": options.device,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(), "parameters": backbone + 2 * head,
        # 6 (parameters - embedding) + 12 L d T / 2
        "flops_per_token": 6 * (backbone + head) + 6 * options.layers * inner * options.context,
        "cases": [],
    }
    modes = [mode for mode in (False, True)
             if options.eager == options.compile or mode == options.compile]
    wanted = options.micro
    for compiled in modes:
        options.micro = wanted
        case = attempt(options, options, device, compiled)
        result["cases"].append(case)
        if not options.json:
            print(f"{case['name']:<16} {case['tokens_per_second']:10.0f} tokens/s  "
                  f"{case['seconds_per_update'] * 1e3:9.1f} ms per update  "
                  f"{case['peak_memory_bytes'] / 2**30:7.2f} GiB")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
