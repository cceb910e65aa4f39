#!/usr/bin/env python3
"""Compare the tokenizer with Hugging Face's `tokenizers`: the same ids from the same files.

    tokenizers_compare.py BUILD [--text FILE]...     BUILD holds tests/tokenizer_test
    tokenizers_compare.py --golden DIR               write the golden files of tokenizer_test

Exit code 0: equal, 1: not, 77: `tokenizers` cannot be imported.
"""

import array
import json
import os
import random
import subprocess
import sys
import tempfile

try:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
except ImportError:
    print("tokenizers_compare: skipped, the Python module `tokenizers` is not there")
    sys.exit(77)

MARKER = "<|endoftext|>"

CORPUS = """In the beginning God created the heaven and the earth. And the earth was without form,
and void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face of
the waters. And God said, Let there be light: and there was light. And God saw the light, that it
was good: and God divided the light from the darkness. And God called the light Day, and the
darkness he called Night. And the evening and the morning were the first day.
It's we're I'm they've you'll he'd 'S 'LL don't DON'T 12345 678 3.14159 2024-11-30
    for (int i = 0; i < n; i++) {\n\t\tsum += x[i];\n\t}\n\n\n
Größe übermäßig façade naïve São Paulo Ελλάδα Москва 日本語のテキスト 中文文本 한국어 עברית العربية
😀 👩‍👩‍👧 🏳️‍🌈 ½ ² Ⅷ ٣ ₹ € … — “quotes” \u00a0nbsp\u3000ideographic\u2003em
""" * 4

STRINGS = [
    "", " ", "  ", "   ", "a", " a", "  a", "a ", "a  ", "a  b", "a   b   ", "\n", "\n\n", " \n ",
    "\t\tif x:\n\n\n  return\r\n ", "trailing spaces   ", "trailing tab\t", "  \t \n  x",
    "I'm we're they'll he'd 's 'S 'LL 'Ll it's'd", "''s'", "can't've", "o'clock '90s",
    "Hello, world!", "In the beginning God created the heaven and the earth.",
    "1234567890 1,234.56 3.14e-10 x1y2", "...!?;:--__==", "for(i=0;i<n;++i){a[i]*=2;}",
    "Größe façade naïve", "Ελλάδα Москва", "日本語のテキスト 中文文本", "한국어 עברית العربية",
    "😀 👩‍👩‍👧 🏳️‍🌈", "½ ² Ⅷ ٣ ₹ €", "e\u0301 combining", "\u00a0x\u00a0\u00a0y", "\u3000\u3000x",
    "a\u2003b\u2028c\u2029d\u0085e\u180ef\u200bg", "zero\u0000byte", "\x01\x02\x7f", "\ufeffbom",
    "\ufffd replacement", "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "<|endoftext",
    "<<|endoftext|>|endoftext|>", "a" * 300, " " * 300 + "x", "ab" * 200, "\n" * 50,
    "supercalifragilisticexpialidocious" * 3, "ÿþ", "\U0010fffd\U000e0041",
]


def ids(tokenizer, text, special):
    tokenizer.encode_special_tokens = not special
    return tokenizer.encode(text, add_special_tokens=False).ids


def write(path, text):
    with open(path, "w", encoding="utf-8", newline="") as f:
        f.write(text)


def golden(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        [CORPUS],
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=[MARKER],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    os.makedirs(folder, exist_ok=True)
    model = json.loads(tokenizer.to_str())
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["model"]["merges"]]
    model["model"]["merges"] = pairs
    write(os.path.join(folder, "pairs.json"), json.dumps(model, ensure_ascii=False))
    lines = [" ".join(pair) for pair in pairs]
    model["model"]["merges"] = lines
    write(os.path.join(folder, "tokenizer.json"), json.dumps(model, ensure_ascii=False))
    write(os.path.join(folder, "vocab.json"), json.dumps(model["model"]["vocab"]))
    write(os.path.join(folder, "merges.txt"), "#version: 0.2\n" + "\n".join(lines) + "\n")
    cases = []
    for text in STRINGS + [CORPUS[:1500]]:
        for special in (False, True):
            case = {"hex": text.encode().hex(), "special": special}
            case["ids"] = ids(tokenizer, text, special)
            if not special or MARKER in text:
                cases.append(json.dumps(case))
    write(os.path.join(folder, "strings.json"), "[\n" + ",\n".join(cases) + "\n]\n")


def ours(program, tokenizer, data, special, folder):
    path = os.path.join(folder, "text")
    with open(path, "wb") as f:
        f.write(data)
    mode = "encode-special" if special else "encode"
    run = subprocess.run([program, mode, tokenizer, path], capture_output=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(run.stdout.decode() + run.stderr.decode())
    return array.array("i", run.stdout).tolist()


def random_text(rng, n):
    pools = ["abc ABC'sdtmrevl", " \t\n\r\u00a0\u3000\u2003", "0123456789½²Ⅷ", ".,;:!?'\"-<|>",
             "äöüßéñçøΩжшй日本中文한עא", "😀👍🏽\u200d\ufe0f\u0301\ufffd"]
    return "".join(rng.choice(rng.choice(pools)) for _ in range(n))


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--golden":
        golden(sys.argv[2])
        return 0
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    program = os.path.join(sys.argv[1], "tests", "tokenizer_test")
    files = [sys.argv[i + 1] for i, a in enumerate(sys.argv[:-1]) if a == "--text"]
    rng = random.Random(1)
    bad = count = 0
    with tempfile.TemporaryDirectory(prefix="perigee-") as folder:
        corpus = os.path.join(folder, "corpus.txt")
        write(corpus, CORPUS + "".join(random_text(rng, 200) + "\n" for _ in range(50)))
        for vocab, text in [(257, corpus), (700, corpus)] + [(4096, f) for f in files]:
            saved = os.path.join(folder, "tokenizer.json")
            subprocess.run([program, "train", text, str(vocab), saved], check=True)
            theirs = Tokenizer.from_file(saved)
            # Saved again by Hugging Face (merges as pairs) and loaded here.
            again = os.path.join(folder, "again.json")
            theirs.save(again)
            texts = STRINGS + [random_text(rng, rng.randrange(1, 400)) for _ in range(60)]
            with open(text, encoding="utf-8", newline="") as f:
                texts.append(f.read())
            for t in texts:
                for special in (False, True):
                    want = ids(theirs, t, special)
                    for path in (saved, again):
                        count += 1
                        if ours(program, path, t.encode(), special, folder) != want:
                            bad += 1
                            print(f"different ids: vocabulary {vocab}, special {special}: {t[:60]!r}")
            if theirs.decode(ids(theirs, CORPUS, False), skip_special_tokens=False) != CORPUS:
                bad += 1
                print(f"vocabulary {vocab}: Hugging Face does not decode to the text")
    print(f"tokenizers_compare: {count - bad} passed, {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
