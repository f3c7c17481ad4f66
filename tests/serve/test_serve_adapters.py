"""From a folder to a tuned model that is served: the same answers from the run, from what peft would read, and over HTTP. Both are
asked with the template of the conversations that were learned from."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from patience import HANG_SECONDS
from test_serve_ranks import ask, served

from shardwise.cli.main import main

KEYS = ("--train.global_batch=4", "--train.seq_len=64", "--train.device=cpu", "--train.eval_every=0")
MODEL = ("--model.layers=2", "--model.hidden=32", "--model.heads=2")
TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base as `convert from-hf` leaves it, a run of adapters beside it, and these as peft has them."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "run.toml").write_text('name = "tiny"\n')
    (folder / "template").write_text(TEMPLATE)
    messages = [dict(role="user", content="two"), dict(role="assistant", content="2")]
    (folder / "chat.jsonl").write_text((json.dumps(dict(messages=messages)) + "\n") * 40)
    run, base, out = (str(folder / name) for name in ("run.toml", "base", "runs"))
    assert main(["train", run, *MODEL, *KEYS, "--train.steps=2", "--out", f"{out}/base"]) == 0
    assert main(["convert", "to-hf", f"{out}/base", str(folder / "hf")]) == 0
    assert main(["convert", "from-hf", str(folder / "hf"), base]) == 0
    made = ["--tokenizer", base, "--chat-template", str(folder / "template"), "--out", str(folder / "set"), "--json"]
    assert main(["data", "build", "--chat", str(folder / "chat.jsonl"), *made]) == 0
    learns = [f"--train.weights={base}", f"--data.sets={folder / 'set'}", "--objective.kind=sft", "--train.steps=8"]
    more = ["--adapter.kind=lora", "--adapter.rank=4", "--train.lr=3e-2", "--train.warmup=0", "--name=tiny"]
    assert main(["train", f"{base}/run.toml", *KEYS, *learns, *more, "--out", f"{out}/sft"]) == 0
    assert main(["convert", "to-peft", f"{out}/sft", str(folder / "peft")]) == 0
    assert main(["convert", "from-peft", str(folder / "peft"), str(folder / "back"), "--base", base]) == 0
    return folder


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["generate", *words, "--prompt", "<two>", "--max-tokens", "8", "--temperature", "0", "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["samples"][0]["text"])


@pytest.mark.drawn(group="servers")
def test_a_server_of_adapters_answers_as_the_run_that_trained_them(
    tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run, peft = (str(tuned / name) for name in ("base", "runs/sft", "peft"))
    wanted = generated(capsys, run)
    assert wanted != generated(capsys, base)
    assert generated(capsys, str(tuned / "back")) == wanted
    assert generated(capsys, base, "--adapter", peft) == generated(capsys, base, "--adapter", run) == wanted
    with served(tuned / "base", "--adapter", peft, "--model-name", "tiny") as (_, url):
        assert ask(url, "<two>", tokens=8)["choices"][0]["text"] == wanted
        body = dict(messages=[dict(role="user", content="two")], max_tokens=1)
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.loads(urllib.request.urlopen(request, timeout=HANG_SECONDS).read())
    assert answer["usage"]["prompt_tokens"] == len("<two>"), "asked with another template than it was trained with"


@pytest.mark.parametrize("name", ["back", "peft"])
def test_adapters_keep_the_template_that_they_were_trained_with(tuned: Path, name: str) -> None:
    assert (tuned / name / "chat_template.jinja").read_text() == TEMPLATE
