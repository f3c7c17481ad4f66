"""`shardwise eval` against a forward pass of each document by itself, without packing, cache or engine."""

from __future__ import annotations

import json
import math
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import model_of, running
from tokenizers_of_each_kind import word_piece

from shardwise.checkpoint.folder import checkpoint_folder
from shardwise.checkpoint.weights import load_model
from shardwise.cli.main import main
from shardwise.data.shards import TokenSet
from shardwise.data.tokenizer import ByteTokenizer, JsonTokenizer
from shardwise.evaluate.answering import EngineAnswerer, HttpAnswerer, Wanted, engine_answerer
from shardwise.evaluate.loss import SetLoss
from shardwise.evaluate.tasks import Question, read_questions, score
from shardwise.model import Transformer
from shardwise.run import UserError, read_run
from shardwise.serve.engine import Engine
from shardwise.serve.request import Request

LENGTH = 48


@pytest.fixture(scope="module")
def model(trained: Path) -> Transformer:
    return load_model(trained, torch.float64)[0]


@pytest.fixture(scope="module")
def answerer(trained: Path) -> EngineAnswerer:
    return engine_answerer(checkpoint_folder(trained), read_run(checkpoint_folder(trained) / "run.toml"), 64)


@torch.no_grad()
def logprobs(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """Of each token but the first."""
    rows = model(torch.tensor([tokens[:-1]])).result[0].log_softmax(-1)
    return rows[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]


def test_loss_of_conversations(
    trained: Path, chat_set: Path, model: Transformer, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = TokenSet.open(chat_set)
    total, count, start = 0.0, 0, 0
    for end in tokens.ends.tolist():
        own, mask = tokens.read(start, end)[: LENGTH + 1], tokens.read_mask(start, end)[: LENGTH + 1]
        learned = torch.from_numpy(mask[1:].astype(bool))
        total -= float(logprobs(model, own.tolist())[learned].sum())
        count += int(learned.sum())
        start = end
    assert main(["eval", str(trained), "--set", str(chat_set), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-9)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-9)
    assert found["loss"] < 3.0 < math.log(257)  # something was learned


def test_loss_of_a_text(trained: Path, model: Transformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("1 + 1 = 2, 2 + 1 = 3; " * 20)
    assert main(["data", "build", str(tmp_path / "a.txt"), "--out", str(tmp_path / "set")]) == 0
    tokens = TokenSet.open(tmp_path / "set")
    windows = [tokens.read(at, at + LENGTH + 1).tolist() for at in range(0, tokens.tokens - LENGTH - 1, LENGTH)]
    expected = -sum(float(logprobs(model, window).sum()) for window in windows) / (len(windows) * LENGTH)
    capsys.readouterr()
    assert main(["eval", str(trained), "--set", str(tmp_path / "set")]) == 0
    text = capsys.readouterr().out
    assert f"loss        {expected:.4f}" in text
    assert f"tokens      {len(windows) * LENGTH:,}" in text


def test_mistakes(trained: Path, chat_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained)]) == 2
    assert "--set DIR, --tasks FILE" in capsys.readouterr().err
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "a"}\n{"question": "b", "choices": ["x"], "answer": 0}\n{"x": 1}\n\n')
    with pytest.raises(UserError) as found:
        read_questions(questions)
    assert [str(p.where).rpartition(":")[2] for p in found.value.problems] == ["1", "2", "3"]


def test_a_line_of_questions_ends_where_json_lines_end(tmp_path: Path) -> None:
    """Not at other line breaks, which JSON may hold inside a text."""
    texts = ["one\u2028two", "three\u0085four\u2029five"]
    path = tmp_path / "q.jsonl"
    rows = [json.dumps({"question": text, "answer": "x"}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join(rows).encode())
    assert [question.text for question in read_questions(path)] == texts


def test_a_file_of_questions_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n', encoding="utf-8-sig")
    assert [question.text for question in read_questions(path)] == ["a"]


def test_files_without_questions_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    for content, message in (
        (None, "cannot be read: No such file or directory"),
        (b"\xff", "cannot be read: it is not UTF-8"),
        (b"no JSON", "is not JSON: Expecting value at column 1"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError) as found:
            read_questions(path)
        assert found.value.problems[0].message == message


def test_a_question_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n' + "[" * 100_000)
    with pytest.raises(UserError, match="nested too deeply") as found:
        read_questions(path)
    assert [problem.where for problem in found.value.problems] == [f"{path}:2"]


def test_no_answer_is_longer_than_learned_positions(trained: Path) -> None:
    run = read_run(checkpoint_folder(trained) / "run.toml")
    run = replace(run, model=replace(run.model, position="learned", max_positions=64))
    with pytest.raises(UserError, match="65 tokens exceeds the model's 64 positions"):
        engine_answerer(checkpoint_folder(trained), run, 65)


@pytest.mark.parametrize(("loss", "shown"), [(math.nan, None), (math.inf, None), (800.0, 800.0)])
def test_the_json_of_a_model_that_diverged_is_json(
    loss: float,
    shown: float | None,
    trained: Path,
    chat_set: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shardwise.evaluate.loss.set_loss", lambda *_: SetLoss(loss, 10, 1))
    assert main(["eval", str(trained), "--set", str(chat_set), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    figures = {"loss": shown, "perplexity": None, "tokens": 10}
    assert found | figures == found
    assert found["sets"] == [{"set": str(chat_set), **figures, "rows": 1}]


PAIRS = [("12 + 1 =", " 13"), ("12 + 1 = ", "13"), ("", "12 +"), ("x" * 200, " 1"), ("a", "b" * 100)]


def test_likelihoods(model: Transformer, answerer: EngineAnswerer) -> None:
    pairs = [answerer.encode_pair(*pair) for pair in PAIRS]
    assert pairs[0] == pairs[1]
    assert pairs[2][0] == [256]
    found = answerer.likelihoods(pairs)
    for pair, each in zip(pairs, found, strict=True):
        context, continuation = answerer.cut(*pair)
        assert len(context) + len(continuation) <= answerer.longest
        own = logprobs(model, context + continuation)[len(context) - 1 :]
        assert each.logprob == pytest.approx(float(own.sum()), rel=1e-9)
        best = model(torch.tensor([context + continuation])).result[0].argmax(-1)[len(context) - 1 : -1]
        assert each.greedy == (best.tolist() == continuation)
    assert answerer.likelihoods([]) == []


def test_over_http_as_in_this_process(trained: Path, answerer: EngineAnswerer) -> None:
    run = read_run(checkpoint_folder(trained) / "run.toml")
    served = engine_answerer(checkpoint_folder(trained), run, 64).engine
    with running(served, model_of()) as server:
        other = HttpAnswerer(server.url, ByteTokenizer(), 64)
        pairs = [answerer.encode_pair(*pair) for pair in PAIRS]
        for one, two in zip(answerer.likelihoods(pairs), other.likelihoods(pairs), strict=True):
            assert one.greedy == two.greedy
            assert one.logprob == pytest.approx(two.logprob, rel=1e-9)
        wanted = [Wanted(answerer.encode(f"{n} + 1 ="), 8, ("\n", "3")) for n in range(6)]
        assert answerer.generate(wanted) == other.generate(wanted)
    with pytest.raises(UserError, match="does not answer"):
        HttpAnswerer("http://127.0.0.1:1", ByteTokenizer(), 64)


def test_a_server_that_wants_a_key_gets_it() -> None:
    with running(keys=("schlüssel",)) as server:
        for key, said in (("", "wants an API key; give it as api_key"), ("guess", "does not accept the api_key")):
            with pytest.raises(UserError, match=said):
                HttpAnswerer(server.url, ByteTokenizer(), 64, key)
        for key in ("schlüssel", "schlüssel\n"):  # as a file has it
            assert HttpAnswerer(server.url, ByteTokenizer(), 64, key).generate([]) == []
        with pytest.raises(UserError, match="a key has no line breaks"):
            HttpAnswerer(server.url, ByteTokenizer(), 64, "schlüs\nsel")


@pytest.mark.parametrize(
    "said",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b"HTTP/1.1 200 OK\r\n\r\n<p>"],
)
def test_what_is_no_such_server_is_a_sentence(said: bytes) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UserError, match=f"http://127.0.0.1:{listener.getsockname()[1]} does not answer"):
            HttpAnswerer(f"http://127.0.0.1:{listener.getsockname()[1]}", ByteTokenizer(), 64)
        thread.join()


def tokenizer_with_prefix() -> JsonTokenizer:
    from tokenizers.processors import TemplateProcessing

    library = word_piece()
    library.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    return JsonTokenizer(library.to_str().encode(), end="</s>")


def test_a_prompt_has_the_prefix_of_its_tokenizer_once(answerer: EngineAnswerer) -> None:
    """Also where a chat template has written it."""
    other = EngineAnswerer(answerer.engine, tokenizer_with_prefix())
    assert other.encode("hello world") == other.encode("</s>hello world") == [1, 2, 3]
    assert other.encode("hello</s>") == [1, 2, 1]
    for context in ("hello", "</s>hello"):
        assert other.encode_pair(context, " world") == ([1, 2], [3])


def test_generate_encodes_a_prompt_as_an_evaluation_does(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(checkpoint_folder(trained), tmp_path / "model")
    tokenizer_with_prefix().save(folder)
    asked: list[tuple[int, ...]] = []

    def watched(engine: Engine, request: Request) -> None:
        asked.append(request.prompt)
        add(engine, request)

    add = Engine.add
    monkeypatch.setattr(Engine, "add", watched)
    words = ["--prompt", "hello world", "--prompt", "</s>hello", "--max-tokens", "1"]
    assert main(["generate", str(folder), *words]) == 0
    assert asked == [(1, 2, 3), (1, 2)]


def test_the_publishers_end_tokens_end_an_answer(
    trained: Path, answerer: EngineAnswerer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [Wanted(answerer.encode("7 + 1 ="), 8)]
    text = answerer.generate(wanted)[0]
    end = text[-1]
    folder = shutil.copytree(checkpoint_folder(trained), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, ord(end)]}))
    other = engine_answerer(folder, read_run(folder / "run.toml"), 64)
    assert other.generate(wanted) == [text[: text.index(end)]]
    words = ["generate", str(folder), "--prompt", "7 + 1 =", "--max-tokens", "8", "--temperature", "0", "--json"]
    assert main(words) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert (sample["text"], sample["ended_by"]) == (text[: text.index(end)], "end")


def test_tasks(
    trained: Path, model: Transformer, answerer: EngineAnswerer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answerer.generate([Wanted(answerer.encode("7 + 1 ="), 4, ("\n",))])[0].strip()
    rows = [
        {"question": "7 + 1 =", "answer": ["no", said]},
        {"prompt": "7 + 1 =", "answer": "surely not"},
        {"question": "7 + 1 =", "choices": ["8", "twelve hundred"], "answer": 0},
        {"question": "7 + 1 =", "choices": ["8", "q"], "answer": "q"},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    likely, unlikely = (
        [float(logprobs(model, [*b"7 + 1 = ", *choice.encode()])[7 - 1 :].sum()) for choice in rows[n]["choices"]]
        for n in (2, 3)
    )
    found = score(answerer, read_questions(path), 4)
    assert found.exact_match == 0.5
    assert found.answers[2]["logprobs"] == pytest.approx(likely, rel=1e-9)
    assert found.acc == ((likely[0] > likely[1]) + (unlikely[1] > unlikely[0])) / 2
    means = likely[0] > likely[1] / len("twelve hundred"), unlikely[1] > unlikely[0]
    assert found.acc_norm == sum(means) / 2
    out = tmp_path / "said.jsonl"
    assert main(["eval", str(trained), "--tasks", str(path), "--max-tokens", "4", "--json", "--answers", str(out)]) == 0
    (printed,) = json.loads(capsys.readouterr().out)["tasks"]
    assert printed == {"tasks": str(path), **found.as_dict()}
    assert [json.loads(line)["answer"] for line in out.read_text().splitlines()] == [a["answer"] for a in found.answers]


def test_questions_that_do_not_fit_are_told(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": "1" * 44, "answer": "2"},  # 48 positions hold this and 4 tokens
        {"question": "1" * 45, "answer": "2"},
        {"question": "1" * 44, "choices": ["8", "q"], "answer": 0},
        {"question": "1" * 44, "choices": ["8", "quite long"], "answer": 0},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", str(trained), "--tasks", str(path), "--max-tokens", "4", "--sequence", "48"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"][0]["cut"] == 2
    assert main(words) == 0
    assert "cut         2: longer than the model's context" in capsys.readouterr().out
    assert main([*words[:-1], "64"]) == 0
    assert "longer than" not in capsys.readouterr().out


def test_questions_through_a_template(answerer: EngineAnswerer) -> None:
    from shardwise.data.chat.template import ChatTemplate

    template = ChatTemplate("{{ messages[0].content }} =")
    plain = score(answerer, [Question("7 + 1 =", choices=(" 8", " 9"), right=0)])
    asked = score(answerer, [Question("7 + 1", choices=(" 8", " 9"), right=0)], template=template)
    assert asked.answers[0]["logprobs"] != plain.answers[0]["logprobs"]
    spaced = score(answerer, [Question("7 + 1 =", choices=("8", "9"), right=0)])
    assert asked.answers[0]["logprobs"] == pytest.approx(spaced.answers[0]["logprobs"], rel=1e-9)
