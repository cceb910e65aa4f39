#!/usr/bin/env python3
"""Export the head of a Hugging Face causal model for pg.head: U, hidden states, targets.

usage: export_head.py MODEL TEXT.txt OUT.safetensors [POSITIONS]

MODEL is a folder or a name that transformers loads. OUT holds U [V, d], hidden [n, d] (what the
output embedding reads) in F32 and targets [n] in I32, for the first n = 2048 positions of the text.
Then: perigee repl --head OUT.safetensors
"""
import sys
import torch
import transformers
from safetensors.torch import save_file


def export(model, tokens, out):
    with torch.no_grad():
        kept = []
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda _, inputs: kept.append(inputs[0]))
        model.eval()(tokens[None, :-1])
        hook.remove()
        save_file({"U": model.get_output_embeddings().weight.detach().float().clone(),
                   "hidden": kept[0][0].float().contiguous(),
                   "targets": tokens[1:].to(torch.int32)}, out)


def main():
    name, text, out = sys.argv[1:4]
    count = int(sys.argv[4]) if len(sys.argv) > 4 else 2048
    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    with open(text) as file:
        tokens = transformers.AutoTokenizer.from_pretrained(name)(file.read())["input_ids"]
    export(model, torch.tensor(tokens[:count + 1]), out)


if __name__ == "__main__":
    main()
