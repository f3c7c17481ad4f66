"""How fast `shardwise data build` tokenises, beside the `tokenizers` library's own batch encoding. Ours is
timed end to end: starting workers, reading JSON, tokenising, writing shards. Theirs is timed for the one call
alone, its texts already in memory. They alternate in fresh processes. The ratio is the median of those of each
round, so that a busy spell of the machine falls on both sides; below 0.9 it is a failure.

    python benchmarks/tokenize_speed.py [--megabytes 48] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REQUIRED = 0.9
PEER = "encode_batch"
NAMES = {
    "encode_batch": "tokenizers encode_batch, texts in memory",
    "build": "shardwise data build, JSONL to shards",
    "encode_batch_fast": "tokenizers encode_batch_fast, texts in memory",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=48, help="size of the corpus (default: 48)")
    parser.add_argument("--rounds", type=int, default=3, help="times each is measured (default: 3)")
    parser.add_argument(
        "--vocab", type=int, default=16384, help="size of the tokenizer trained for it (default: 16384)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--measure", choices=list(NAMES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.folder)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        megabytes, documents = prepare(folder, args.megabytes, args.vocab)
        seconds: dict[str, list[float]] = {what: [] for what in NAMES}
        tokens = set()
        for _ in range(args.rounds):
            for what in NAMES:
                result = in_fresh_process(what, folder)
                seconds[what].append(result["seconds"])
                tokens.add(int(result["tokens"]))
    if len(tokens) != 1:
        raise SystemExit(f"the contestants disagree on the number of tokens: {tokens}")
    return report(args.json, seconds, megabytes, documents, tokens.pop())


def prepare(folder: Path, megabytes: float, vocab: int) -> tuple[float, int]:
    """Train a tokenizer on Python's own texts, cut a corpus from them; gives its megabytes and documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from shardwise.data.corpus import corpus_texts

    texts = list(corpus_texts().values())
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    library.save(str(folder / "tokenizer.json"))

    chance = random.Random(0)
    written = documents = 0
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            text = chance.choice(texts)
            start = chance.randrange(len(text))
            document = text[start : start + chance.randrange(200, 8000)]
            if document.isspace():
                continue
            file.write(json.dumps({"text": document}) + "\n")
            written += len(document.encode())
            documents += 1
    return written / 1e6, documents


def in_fresh_process(what: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", what, "--folder", str(folder)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(finished.stderr)
    return json.loads(finished.stdout)


def measure(what: str, folder: Path) -> dict[str, float]:
    if what == "build":
        from shardwise.data.build import build

        with tempfile.TemporaryDirectory(dir=folder) as out:
            begun = time.perf_counter()
            summary = build([folder / "corpus.jsonl"], Path(out) / "set", tokenizer=folder / "tokenizer.json")
            seconds = time.perf_counter() - begun
        return {"seconds": seconds, "tokens": summary.index.tokens - summary.index.documents}

    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    begun = time.perf_counter()
    encodings = getattr(library, what)(texts, add_special_tokens=False)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "tokens": sum(len(encoding) for encoding in encodings)}


def report(as_json: bool, seconds: dict[str, list[float]], megabytes: float, documents: int, tokens: int) -> int:
    speeds = {what: megabytes / statistics.median(times) for what, times in seconds.items()}
    ratio = statistics.median(peer / ours for peer, ours in zip(seconds[PEER], seconds["build"], strict=True))
    if as_json:
        result = {
            "megabytes": round(megabytes, 2),
            "documents": documents,
            "tokens": tokens,
            "cores": os.cpu_count(),
            "seconds": {what: [round(s, 3) for s in times] for what, times in seconds.items()},
            "megabytes_per_second": {what: round(speed, 3) for what, speed in speeds.items()},
            "ratio": round(ratio, 3),
            "required": REQUIRED,
        }
        print(json.dumps(result))
    else:
        print(f"{megabytes:.1f} MB, {documents:,} documents, {tokens:,} tokens, {os.cpu_count()} cores")
        for what, name in NAMES.items():
            times = seconds[what]
            spread = f"median of {len(times)}; {min(times):.2f} to {max(times):.2f} s"
            print(f"  {name:48} {speeds[what]:6.2f} MB/s   ({spread})")
        print(f"shardwise / {PEER}: {ratio:.2f}, median of the rounds (at least {REQUIRED} required)")
    return 0 if ratio >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
