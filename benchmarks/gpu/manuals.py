"""Text to pre-train on that any machine with Debian's packages has: the manuals of Linux, Python and PostgreSQL, 44 MB of English
prose and code, as `train.jsonl` and `validation.jsonl` (every twentieth document), and a byte-level BPE tokenizer made of it.

    apt-get download linux-doc-6.1 python3.11-doc postgresql-doc-15
    for package in *.deb; do dpkg-deb -x $package manuals; done
    python benchmarks/gpu/manuals.py manuals text
    for part in train validation; do shardwise data build text/$part.jsonl --tokenizer text --out text/$part; done
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import tokenizers

VALIDATION = 0.05
SHORTEST = 200


def texts(folder: Path) -> Iterator[str]:
    """The English documents below a folder, each once."""
    seen = set()
    for path in sorted((folder / "usr" / "share" / "doc").rglob("*")):
        if not path.is_file() or "translations" in path.parts or "changelog" in path.name:
            continue
        name = path.name.removesuffix(".gz")
        page = name.endswith(".html") and "postgresql" in str(path)
        if not page and not name.endswith((".rst", ".txt")):
            continue
        content = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if page:
            text = html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"(?s)<head.*?</head>", "", text)))
        if len(text) >= SHORTEST and text not in seen:
            seen.add(text)
            yield text


def for_validation(text: str) -> bool:
    """By the text alone, so that what other documents there are changes nothing."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:4], 16) < VALIDATION * 2**16


def make_tokenizer(documents: list[str], vocab: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of the documents."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(documents, trainer)
    return made


def main() -> None:
    """Read, divide, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manuals", type=Path, help="folder with the unpacked packages")
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {"train": [], "validation": []}
    for text in texts(args.manuals):
        parts["validation" if for_validation(text) else "train"].append(text)
    for name, documents in parts.items():
        lines = (json.dumps({"text": text}) + "\n" for text in documents)
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(documents)} documents, {sum(map(len, documents)):,} characters")
    make_tokenizer(parts["train"], args.vocab).save(str(args.out / "tokenizer.json"))


if __name__ == "__main__":
    main()
