#!/usr/bin/env python3
"""Read a run's event files with the `tensorboard` package: the numbers of metrics.jsonl after a
stop and a resume, histograms of the head's row norms, the recipe's text.

usage: tensorboard_compare.py BUILD
"""
import glob
import json
import os
import struct
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

VOCAB = 61
SCRIPT = """
local pg = require "perigee"
local recipe = pg.recipe {
  name = "board", seed = 1,
  model = { layers = 1, width = 16, heads = 2, head_dim = 8, context = 8, vocab = 61 },
  data = pg.data.shards { path = "." },
  batch = { sequences = 4 }, updates = 12, log = { every = 2 },
  optimizers = { { match = ".", pg.optim.adamw { lr = 1e-2 } } },
}
local run = assert(pg.open(recipe, { out = "run", threads = 1 }))
for update in run:updates() do if update == 6 then run:stop("half") end end
run:close()
run = assert(pg.resume("run", { threads = 1, recipe = recipe }))
for _ in run:updates() do end
run:close()
"""


def main():
    program = os.path.join(os.path.abspath(sys.argv[1]), "perigee")
    with tempfile.TemporaryDirectory() as folder:
        for name, shift in (("train_000001", 0), ("val_000000", 5)):
            tokens = [(i * i // 7 + shift) % VOCAB for i in range(4000)]
            with open(f"{folder}/text_{name}.bin", "wb") as file:
                file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
                file.write(struct.pack(f"<{len(tokens)}H", *tokens))
        with open(f"{folder}/board.lua", "w") as file:
            file.write(SCRIPT)
        subprocess.run([program, "run", "board.lua"], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL)
        # A kill in the middle of a record.
        last = sorted(glob.glob(f"{folder}/run/events.out.tfevents.*"))[-1]
        with open(last, "ab") as file:
            file.write(struct.pack("<Q", 100) + b"torn")
        check(f"{folder}/run")


def check(run):
    board = EventAccumulator(run, size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    board.Reload()
    tags = board.Tags()
    with open(f"{run}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    lines = {line["progress/update"]: line for line in lines if "progress/update" in line}
    assert sorted(lines) == [2, 4, 6, 8, 10, 12], sorted(lines)
    compared = 0
    for tag in tags["scalars"]:
        for event in board.Scalars(tag):
            want = struct.unpack("<f", struct.pack("<f", lines[event.step][tag]))[0]
            assert event.value == want, (tag, event)
            compared += 1
    losses = [event.step for event in board.Scalars("train/loss")]
    assert losses == sorted(lines), losses
    norms = board.Histograms("head/row_norms")
    assert [event.step for event in norms] == sorted(lines)
    for event in norms:
        h = event.histogram_value
        assert h.num == VOCAB and sum(h.bucket) == VOCAB and 0 <= h.min <= h.max, h
    assert "recipe" in tags["tensors"], tags
    text = tensor_util.make_ndarray(board.Tensors("recipe")[0].tensor_proto).item()
    assert b'name = "board"' in text, text
    print(f"tensorboard: {compared} scalars, {len(norms)} histograms and the recipe agree")


main()
