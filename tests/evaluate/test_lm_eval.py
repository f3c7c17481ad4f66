"""The adapter for EleutherAI's `lm-eval`, by its own requests and by its own loop; skipped where that is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from running import model_of, running

from shardwise.checkpoint.weights import load_model
from shardwise.evaluate.lm_eval import ShardwiseLM


def asked(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@torch.no_grad()
def test_requests(trained: Path) -> None:
    lm = ShardwiseLM.of_checkpoint(trained, 40)
    model = load_model(trained, torch.float64)[0]
    ((logprob, _),) = lm.loglikelihood([asked("loglikelihood", "12 + 1 =", " 13")])
    text = [*b"12 + 1 = 13"]
    rows = model(torch.tensor([text])).result[0].log_softmax(-1)
    assert logprob == pytest.approx(sum(float(rows[n - 1, text[n]]) for n in range(8, 11)), rel=1e-9)

    short, long = "3 + 1 = 4", "7 + 1 = 8. " * 20
    rolled = lm.loglikelihood_rolling([asked("loglikelihood_rolling", each) for each in (short, long)])
    tokens = [256, *short.encode()]
    rows = model(torch.tensor([tokens])).result[0].log_softmax(-1)
    assert rolled[0] == pytest.approx(sum(float(rows[n - 1, tokens[n]]) for n in range(1, len(tokens))), rel=1e-9)
    assert rolled[1] < rolled[0]

    options = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    (said,) = lm.generate_until([asked("generate_until", "7 + 1 =", options)])
    with running(lm.answerer.engine, model_of()) as server:
        other = ShardwiseLM.of_server(server.url, trained, 40)
        assert other.generate_until([asked("generate_until", "7 + 1 =", options)]) == [said]
        again = other.loglikelihood_rolling([asked("loglikelihood_rolling", each) for each in (short, long)])
        assert again == pytest.approx(rolled, rel=1e-9)


def test_by_its_own_loop(trained: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1 =", "choices": [str(n + 1), "x"], "gold": 0} for n in range(8)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: " + str(tmp_path / "q.jsonl") + "\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
        "doc_to_target: gold\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    lm = ShardwiseLM.of_checkpoint(trained, 64)
    found = simple_evaluate(lm, tasks=["sums"], task_manager=manager, bootstrap_iters=0)["results"]["sums"]
    from shardwise.evaluate.tasks import Question, score

    ours = score(lm.answerer, [Question(r["question"], choices=tuple(r["choices"]), right=0) for r in rows])
    assert found["acc,none"] == ours.acc
    assert found["acc_norm,none"] == ours.acc_norm
