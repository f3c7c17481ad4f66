"""`shardwise generate`, and the engine on folders imported from `transformers`, whose own greedy tokens it gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import answers, tokens_of
from fake_engine import FakeEngine
from tiny_models import MODELS, save
from tokenizers_of_each_kind import KINDS, tokenizer_of

from shardwise.checkpoint.huggingface import from_hf
from shardwise.cli.main import main
from shardwise.run import UserError, read_run, run_from_dict
from shardwise.serve.engine import make_engine
from shardwise.serve.generate import Continued, continue_prompts
from shardwise.serve.request import Request, Sampling
from shardwise.train.loop import train

PROMPTS = [(5, 9, 3, 7, 1, 2, 33, 60, 4, 4, 2), (4,), (8, 8, 1)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.drawn(3)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save(tmp_path / "hf", *MODELS[name]).eval()
    from_hf(tmp_path / "hf", tmp_path / "ours")
    run = read_run(tmp_path / "ours" / "run.toml")
    run = replace(
        run,
        train=replace(run.train, dtype="float32", device="cpu"),
        serve=replace(run.serve, page_tokens=4, max_sequences=3, max_step_tokens=6),
    )
    asked = [Request(str(n), prompt, 10, Sampling(0.0, logprobs=1)) for n, prompt in enumerate(PROMPTS)]
    found = answers(make_engine(tmp_path / "ours", run), asked)
    for n, prompt in enumerate(PROMPTS):
        text = list(prompt)
        own = [each for output in found[str(n), 0] for each in output.logprobs]
        for each, token in zip(own, tokens_of(found[str(n), 0]), strict=True):
            with torch.no_grad():
                row = model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
            assert token == int(row.argmax())
            assert each.logprob == pytest.approx(float(row.max()), abs=1e-4)
            text.append(token)


@pytest.mark.drawn(group="whole runs")
def test_the_command_continues_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source.txt"  # not the built-in corpus, which is another with every Python
    source.write_text("def one(): return 1\n" * 40)
    assert main(["data", "build", str(source), "--out", str(tmp_path / "set")]) == 0
    run = run_from_dict(
        dict(
            name="g",
            model=dict(layers=1, hidden=16, heads=2, vocab=257),
            data=dict(sets=[str(tmp_path / "set")]),
            train=dict(steps=2, seq_len=32, global_batch=2, eval_every=0, device="cpu"),
        )
    )
    train(run, tmp_path / "run")
    capsys.readouterr()
    base = ["generate", str(tmp_path / "run"), "--prompt", "def", "--prompt", "a longer one"]
    base += ["--max-tokens", "30", "--json", "--temperature"]  # beyond the length that was trained
    results = []
    for extra in (["0"], ["0", "--dtype", "float64"], ["1", "--seed", "1"], ["1", "--seed", "1"], ["1", "--seed", "2"]):
        assert main(base + extra) == 0
        results.append(json.loads(capsys.readouterr().out)["samples"])
    assert results[0] == results[1]
    assert results[2] == results[3] != results[4]
    assert [s["prompt"] for s in results[0]] == ["def", "a longer one"]
    assert all(len(s["tokens"]) == 30 for s in results[0])
    text = results[0][0]["text"]
    assert main([*base[:4], "--max-tokens", "30", "--temperature", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"def{text}\n"
    # Guesses make the same text, by lookup and by a draft model: here, the model itself.
    draft = [f"--serve.draft={tmp_path / 'run'}", "--serve.speculate=draft"]
    for words, wanted in ((["--serve.speculate=ngram"], results[0]), (draft, results[0])):
        assert main([*base, "0", *words]) == 0
        assert json.loads(capsys.readouterr().out)["samples"] == wanted
    assert main([*base, "1", "--seed", "1", *draft]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == results[2]
    assert main([*base, "0", "--serve.speculate=draft", "--serve.draft=gpt2-124m"]) == 2
    assert "vocabulary of 50257" in capsys.readouterr().err
    stop = results[0][0]["text"][2:4]
    assert main([*base, "0", "--stop", stop]) == 0
    cut = json.loads(capsys.readouterr().out)["samples"][0]
    assert cut["ended_by"] == "stop"
    assert cut["text"] == text[: text.index(stop)]
    assert main(["generate", str(tmp_path / "run"), "--prompt", ""]) == 2
    assert "empty prompt" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_where_its_prompt_ends(kind: str) -> None:
    """Also where the tokenizer strips the blank before a text."""
    tokenizer = tokenizer_of(kind)
    before = tokenizer.encode("hello")
    after = tokenizer.encode("hello the end the hello")[len(before) :]

    def continued(stop: list[str]) -> Continued:
        engine = FakeEngine(tokenizer.vocab, end=tokenizer.end, script=lambda request, index: after)
        return continue_prompts(engine, [before, before], 50, Sampling(0.0), tokenizer, stop)[1]

    assert continued([]) == Continued([*after, tokenizer.end], " the end the hello", "end")
    stopped = continued(["the h", "end"])
    assert (stopped.text, stopped.ended_by) == (" the ", "stop")
    assert tokenizer.decode([*before, *stopped.tokens]) == "hello the end"


def test_more_than_the_learned_positions_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "hf", *MODELS["gpt2"])
    from_hf(tmp_path / "hf", tmp_path / "ours")
    run = read_run(tmp_path / "ours" / "run.toml")
    engine = make_engine(tmp_path / "ours", replace(run, train=replace(run.train, device="cpu")))
    with pytest.raises(UserError, match="64 at most"):
        engine.add(Request("r", (1, 2), 63))
