"""Checks that llama.cpp cuts the corpus into the tokens of training: `python -m demo_model.check --run DIR FILE`, from `tools/`."""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_cpp import Llama
from tokenizers import Tokenizer

from .corpus import Mix, conversations
from .render import segments

# What the corpus has little of, and a user may write.
ODD = (
    "",
    " ",
    "\n\n \n",
    "a  b   c",
    "\t\tx",
    "don't you'll WE'RE",
    "1234567890",
    "½ ² Ⅷ",
    "👩‍👩‍👧 ❤️",
    "中文。测试",
    "e\u0301 ﬁ \u200b",
    "x" * 300,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.run / "tokenizer.json"))
    llama = Llama(str(options.file), vocab_only=True, verbose=False)
    texts = [text for each in conversations(4, 3000, Mix(0.2, 0.1)) for text, _ in segments(each)] + list(ODD)
    for text in texts:
        there = llama.tokenize(text.encode(), add_bos=False, special=True)
        if there != tokenizer.encode(text).ids:
            raise SystemExit(f"{text!r}: {tokenizer.encode(text).ids} in training, {there} in llama.cpp")
        if llama.detokenize(there, special=True) != text.encode():
            raise SystemExit(f"{text!r} is not what its tokens spell")
    print(f"{len(texts)} texts, the same tokens in both")


if __name__ == "__main__":
    main()
