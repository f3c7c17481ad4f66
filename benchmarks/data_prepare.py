"""`shardwise data prepare` beside datatrove: the same made-up corpus through the same steps with the same settings.

    python benchmarks/data_prepare.py make CORPUS --megabytes 100 [--copies 0.85]
    python benchmarks/data_prepare.py golden tests/data/prepare/datatrove.json     # needs datatrove and spaCy
    python benchmarks/data_prepare.py compare CORPUS --out RESULTS --workers 2     # needs datatrove and spaCy

`compare` says which documents each keeps and why not the others, and the time of each, both on two processes. `memory` says the
largest memory of any process of a run, which goes on where it was stopped. Results are in `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STOP = [
    "the",
    "of",
    "and",
    "to",
    "a",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "be",
    "at",
    "by",
    "this",
    "have",
    "from",
    "or",
    "had",
    "not",
    "but",
    "what",
    "all",
    "were",
    "when",
    "we",
]
ENDS = (".", ".", ".", ".", "?", "!", '."', "...", "…", ";", "")
ODD = (
    "Lorem ipsum dolor sit amet, consectetur.",
    "This site uses cookies to make it better for you.",
    "Please enable Javascript to see this page.",
    "function() { return 1; }",
    "# # # # # # # #",
    "Write to jane.doe@mail.example.net or to 8.8.8.8 for more.",
    "Crème brûlée à la carte costs 12.50 or 1,200,000 [12] [citation needed].",
    "Ελληνικά και Русский текст, 中文。",
)


def vocabulary(rng: random.Random, size: int = 20_000) -> list[str]:
    """Made-up words."""
    parts = [
        "ba",
        "be",
        "ca",
        "co",
        "da",
        "de",
        "fi",
        "ga",
        "ge",
        "ha",
        "in",
        "ka",
        "la",
        "le",
        "ma",
        "mi",
        "na",
        "no",
        "on",
        "pa",
        "per",
        "ra",
        "re",
        "ro",
        "sa",
        "se",
        "si",
        "ta",
        "te",
        "ti",
        "tion",
        "to",
        "ver",
        "vi",
    ]
    return [*STOP, *("".join(rng.choices(parts, k=rng.randint(1, 5))) for _ in range(size))]


def documents(count: int, seed: int = 0, copies: float = 0.0) -> Iterator[str]:
    """Documents of all sorts: good ones, lists, repetitions, short ones, other alphabets, copies with and without changes; a
    share of `copies` more that change nothing."""
    rng = random.Random(seed)
    words = vocabulary(rng)
    weights = [1 / (rank + 8) for rank in range(len(words))]
    recent: list[str] = []
    pool: list[str] = []
    for _ in range(count):
        if copies and recent and rng.random() < copies:
            yield rng.choice(recent)
            continue
        if len(pool) < 4000:
            pool += rng.choices(words, weights, k=50_000)
        kind = rng.random()
        if kind < 0.10 and recent:
            text = rng.choice(recent)
        elif kind < 0.25 and recent:
            text = _changed(rng, rng.choice(recent), words)
        else:
            text = _document(rng, pool, kind)
        recent.append(text)
        if len(recent) > 2000:
            recent = recent[1000:]
        yield text


def _changed(rng: random.Random, text: str, words: list[str]) -> str:
    parts = text.split(" ")
    for _ in range(max(1, len(parts) // rng.choice((20, 60, 200)))):
        parts[rng.randrange(len(parts))] = rng.choice(words)
    return " ".join(parts)


def _sentence(rng: random.Random, pool: list[str], end: str) -> str:
    length = rng.randint(3, 25)
    taken = [pool.pop() if pool else "the" for _ in range(length)]
    if rng.random() < 0.1:
        taken[rng.randrange(length)] += rng.choice((",", "'s", "-up", ":", "n't"))
    return " ".join(taken).capitalize() + end


def _document(rng: random.Random, pool: list[str], kind: float) -> str:
    if kind < 0.28:
        return _sentence(rng, pool, ".")
    lines = []
    for _ in range(max(1, int(rng.lognormvariate(2, 0.8)))):
        end = "." if rng.random() < 0.8 else rng.choice(ENDS)
        lines.append(" ".join(_sentence(rng, pool, end) for _ in range(rng.randint(1, 5))))
        if rng.random() < 0.03:
            lines.append(rng.choice(ODD))
    if kind < 0.32:
        lines = [f"- {line[:40]}" for line in lines]
    elif kind < 0.36:
        lines += [rng.choice(lines)] * rng.randint(1, len(lines) + 2)
    elif kind < 0.40:
        lines.append(" ".join([lines[0][:60]] * rng.randint(2, 9)))
    elif kind < 0.43:
        lines = [line[:20] for line in lines]
    return rng.choice(("\n", "\n", "\n\n")).join(lines)


def make(folder: Path, megabytes: float, files: int, seed: int, copies: float) -> None:
    """Write a corpus of JSONL files of about a size."""
    folder.mkdir(parents=True, exist_ok=True)
    most = megabytes * 1e6 / files
    with multiprocessing.Pool() as pool:
        pool.starmap(_make, [(folder / f"{n:03d}.jsonl", most, seed * 1000 + n, copies) for n in range(files)])


def _make(path: Path, most: float, seed: int, copies: float) -> None:
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for text in documents(2**40, seed, copies):
            written += file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            if written >= most:
                break


STEPS = ("gopher_repetition", "gopher_quality", "c4_quality", "fineweb_quality", "minhash")


def run_shardwise(
    corpus: Path, out: Path, workers: int, words: str, steps: tuple[str, ...] = STEPS
) -> tuple[float, int]:
    """The command, its seconds and the memory of its largest process in bytes."""
    recipe = out.with_suffix(".toml")
    paths = [str(path.resolve()) for path in sorted(corpus.glob("*.jsonl"))]
    lines = [f'words = "{words}"', "[[sources]]", 'name = "web"', f"paths = {json.dumps(paths)}"]
    recipe.write_text("\n".join([*lines, *(f'[[steps]]\nkind = "{kind}"' for kind in steps)]))
    command = [sys.executable, "-m", "shardwise", "data", "prepare", str(recipe), "--out", str(out)]
    began = time.monotonic()
    subprocess.run([*command, "--workers", str(workers)], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def run_datatrove(corpus: Path, out: Path, workers: int) -> float:
    """The same through datatrove's pipelines, one task a file; returns seconds."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.dedup import minhash
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    files = len(list(corpus.glob("*.jsonl")))
    config = minhash.MinhashConfig()

    def run(pipeline: list[Any], tasks: int, name: str) -> None:
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=workers, logging_dir=str(out / "logs" / name), start_method="spawn"
        ).run()

    def gone(name: str) -> JsonlWriter:
        return JsonlWriter(str(out / "gone" / name), output_filename="${rank}.jsonl", compression=None)

    began = time.monotonic()
    filters = [
        kind(exclusion_writer=gone(name))
        for kind, name in zip(
            (GopherRepetitionFilter, GopherQualityFilter, C4QualityFilter, FineWebQualityFilter), STEPS, strict=False
        )
    ]
    plain = JsonlWriter(str(out / "filtered"), output_filename="${rank}.jsonl", compression=None)
    run([JsonlReader(str(corpus)), *filters, plain], files, "filter")
    run(
        [JsonlReader(str(out / "filtered")), minhash.MinhashDedupSignature(str(out / "signatures"), config)],
        files,
        "sign",
    )
    run(
        [minhash.MinhashDedupBuckets(str(out / "signatures"), str(out / "pairs"), config=config)],
        config.num_buckets,
        "match",
    )
    run([minhash.MinhashDedupCluster(str(out / "pairs"), str(out / "remove"), config)], 1, "join")
    kept = JsonlWriter(str(out / "kept"), output_filename="${rank}.jsonl", compression=None)
    dedup = minhash.MinhashDedupFilter(str(out / "remove"), exclusion_writer=gone("minhash"))
    run([JsonlReader(str(out / "filtered")), dedup, kept], files, "remove")
    return time.monotonic() - began


def fates_of_datatrove(out: Path) -> dict[str, str]:
    """The step at which each document ended, "" for those that stay; by datatrove's name of it."""
    found: dict[str, str] = {}
    for name in (*STEPS, ""):
        folder = out / "gone" / name if name else out / "kept"
        for path in sorted(folder.rglob("*.jsonl")):
            found |= {json.loads(line)["id"]: name for line in path.open(encoding="utf-8")}
    return found


def fates_of_shardwise(out: Path) -> dict[str, str]:
    """The same, with names made like datatrove's: file and number of the row."""
    from shardwise.data.prepare.fates import Fates

    fates = Fates(out)
    found: dict[str, str] = {}
    counts: dict[str, int] = {}
    for row in range(len(fates)):
        fate = fates[row]
        file = Path(fate.id.rpartition(":")[0]).name
        found[f"{file}/{counts.get(file, 0)}"] = fate.step
        counts[file] = counts.get(file, 0) + 1
    return found


def compare(corpus: Path, out: Path, workers: int, words: str) -> dict[str, Any]:
    """Both, their seconds and where they disagree."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    seconds, memory = run_shardwise(corpus, out / "shardwise", workers, words)
    other = run_datatrove(corpus, out / "datatrove", workers)
    ours, theirs = fates_of_shardwise(out / "shardwise"), fates_of_datatrove(out / "datatrove")
    names = {
        Path(name).name if "/" not in name else "/".join(Path(name).parts[-2:]): step for name, step in theirs.items()
    }
    differ = [(name, step, names.get(name)) for name, step in ours.items() if names.get(name) != step]
    removed = {step: sum(each == step for each in ours.values()) for step in ("", *STEPS)}
    return dict(
        bytes=sum(path.stat().st_size for path in corpus.glob("*.jsonl")), documents=len(ours), removed=removed,
        disagree=len(differ), examples=differ[:5], shardwise_seconds=seconds, datatrove_seconds=other, times_faster=other / seconds,
        memory=memory, workers=workers, cores=len(os.sched_getaffinity(0)),
    )  # fmt: skip


def golden(count: int, seed: int) -> dict[str, Any]:
    """What datatrove does with simply split words: the step at which each document ends. spaCy finds the sentences."""
    import tempfile

    import spacy
    from datatrove.pipeline.dedup import minhash
    from datatrove.utils import word_tokenizers
    from spacy.tokens import Doc

    from shardwise.data.prepare.words import simple_words

    language = spacy.blank("en")
    sentencizer = language.add_pipe("sentencizer")

    class Simple(word_tokenizers.WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return [word for chunk in simple_words(text.split()) for word in chunk]

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[start:stop] for start, stop in self.span_tokenize(text)]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            found = sentencizer(Doc(language.vocab, words=self.word_tokenize(text)))
            return [(0, 0) for _ in found.sents]

    word_tokenizers.load_word_tokenizer = minhash.load_word_tokenizer = lambda name: Simple()
    with tempfile.TemporaryDirectory() as folder:
        write_split(Path(folder, "corpus"), count, seed)
        run_datatrove(Path(folder, "corpus"), Path(folder, "out"), 1)
        found = fates_of_datatrove(Path(folder, "out"))
    order = sorted(found, key=lambda name: (Path(name).parent.name, int(Path(name).name)))
    return dict(count=count, seed=seed, steps=["", *STEPS], fates=[["", *STEPS].index(found[name]) for name in order])


def write_split(folder: Path, count: int, seed: int) -> None:
    """Some documents in three files."""
    folder.mkdir()
    texts = list(documents(count, seed))
    for name, start, stop in (("a", 0, count // 2), ("b", count // 2, 3 * count // 4), ("c", 3 * count // 4, count)):
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts[start:stop])
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("make", "compare", "memory", "golden"))
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--copies", type=float, default=0.0, help="of `make`: the share that only repeats a document")
    parser.add_argument("--out", type=Path, default=Path("prepared"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--words", default="spacy/en")
    parser.add_argument("--steps", default=",".join(("exact", *STEPS)), help="of `memory`")
    args = parser.parse_args()
    if args.verb == "golden":
        args.corpus.write_text(json.dumps(golden(600, 3), separators=(",", ":")) + "\n")
    elif args.verb == "make":
        make(args.corpus, args.megabytes, args.files, args.seed, args.copies)
    elif args.verb == "compare":
        print(json.dumps(compare(args.corpus, args.out, args.workers, args.words), indent=1))
    else:
        steps = tuple(args.steps.split(","))
        seconds, memory = run_shardwise(args.corpus, args.out, args.workers, args.words, steps)
        size = sum(path.stat().st_size for path in args.corpus.glob("*.jsonl"))
        print(json.dumps(dict(bytes=size, steps=steps, seconds=seconds, memory=memory)))


if __name__ == "__main__":
    main()
