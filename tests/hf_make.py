#!/usr/bin/env python3
"""Write a random Qwen3ForCausalLM as transformers saves it.

usage: hf_make.py FOLDER TYPE SHARD

TYPE: float32, bfloat16 or float16. SHARD: largest file, as save_pretrained takes it ("1GB", "40KB":
several files and model.safetensors.index.json).
Exit code 77: transformers or torch is not installed.
"""
import sys

try:
    import torch
    import transformers
except ImportError as reason:
    print(f"skipped: {reason}")
    sys.exit(77)


def main():
    folder, dtype, shard = sys.argv[1:]
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=131, hidden_size=48, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=3, head_dim=24, max_position_embeddings=64,
        rope_theta=5e4, rms_norm_eps=1e-5, tie_word_embeddings=False, initializer_range=0.1))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)


main()
