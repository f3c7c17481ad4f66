"""Tasks from JSONL. A row with `choices` is a multiple-choice question: each choice is scored by its log-likelihood after the
question, and the likeliest is the model's answer, by total log-likelihood (lm-eval's `acc`) or per character (`acc_norm`). Any
other row has an `answer` that the generated text must equal; several accepted answers are a list."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.data.chat.template import ChatTemplate
from shardwise.evaluate.answering import Answerer, Wanted
from shardwise.run import Problem, UserError
from shardwise.run.problems import unreadable

QUESTIONS = ("question", "prompt")
_MOST_NAMED = 20


@dataclass(frozen=True)
class Question:
    """One row of a task file."""

    text: str
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    right: int = -1
    """The index of the right choice."""
    until: tuple[str, ...] = ("\n",)


@dataclass(frozen=True)
class Score:
    """The score on a file of questions: the share of right answers, each figure with the standard error of the mean."""

    exact_match: float | None
    acc: float | None
    acc_norm: float | None
    generated: int
    chosen: int
    errors: dict[str, float]
    answers: list[dict[str, Any]]
    """The model's answers, in the order of the rows."""
    cut: int = 0
    """Questions that were too long for the model's context; the model saw only their end."""

    def as_dict(self) -> dict[str, Any]:
        figures = {"exact_match": self.exact_match, "acc": self.acc, "acc_norm": self.acc_norm}
        found: dict[str, Any] = {name: value for name, value in figures.items() if value is not None}
        found |= {f"{name}_stderr": value for name, value in self.errors.items()}
        return {**found, "questions": self.generated + self.chosen, "cut": self.cut}


def read_questions(path: Path) -> list[Question]:
    """Read the rows of a file; all problems are reported together."""
    found, problems = [], []
    try:
        # Not splitlines(): JSON may hold other line breaks inside a text, such as U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise unreadable(e, "--tasks", path) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_question(json.loads(line)))
        except json.JSONDecodeError as e:
            problems.append(Problem(f"is not JSON: {e.msg} at column {e.colno}", "--tasks", f"{path}:{number}"))
        except ValueError as e:
            problems.append(Problem(str(e), "--tasks", f"{path}:{number}"))
        except RecursionError:
            problems.append(Problem("is nested too deeply to be a question", "--tasks", f"{path}:{number}"))
    if not found and not problems:
        problems.append(Problem("has not a single question", "--tasks", str(path)))
    if problems:
        raise UserError(*problems[:_MOST_NAMED])
    return found


def _question(row: Any) -> Question:
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    text = next((row[name] for name in QUESTIONS if isinstance(row.get(name), str)), None)
    if text is None:
        raise ValueError(f'has no text "{QUESTIONS[0]}" or "{QUESTIONS[1]}"')
    answer = row.get("answer")
    if "choices" in row:
        choices = row["choices"]
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            raise ValueError('"choices" is not a list of two texts or more')
        right = choices.index(answer) if isinstance(answer, str) and answer in choices else answer
        if type(right) is not int or not 0 <= right < len(choices):
            raise ValueError('"answer" is neither one of the choices nor its number, counted from 0')
        return Question(text, choices=tuple(choices), right=right)
    several = answer if isinstance(answer, list) else [answer]
    if not several or not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in several):
        raise ValueError('has no "answer"')
    until = row.get("until", ["\n"])
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, list) or not all(isinstance(each, str) and each for each in until):
        raise ValueError('"until" is neither a text nor a list of texts')
    return Question(text, tuple(str(each).strip() for each in several), until=tuple(until))


def score(
    answerer: Answerer, questions: Sequence[Question], max_tokens: int = 64, template: ChatTemplate | None = None
) -> Score:
    """Ask all questions. With a `template` each question is a user message, and the answer may have several lines."""
    chosen = [n for n, each in enumerate(questions) if each.choices]
    asked = [n for n, each in enumerate(questions) if not each.choices]
    said: list[dict[str, Any]] = [{} for _ in questions]
    pairs = [_pair(answerer, questions[n], choice, template) for n in chosen for choice in questions[n].choices]
    likely = iter(answerer.likelihoods(pairs))
    by_sum, by_letter = [], []
    for n in chosen:
        each = questions[n]
        sums = [next(likely).logprob for _ in each.choices]
        means = [value / len(choice) for value, choice in zip(sums, each.choices, strict=True)]
        by_sum.append(_best(sums) == each.right)
        by_letter.append(_best(means) == each.right)
        said[n] = {"answer": each.choices[_best(sums)], "logprobs": sums, "right": by_sum[-1]}
    wanted = [_wanted(answerer, questions[n], max_tokens, template) for n in asked]
    texts = answerer.generate(wanted)
    matches = []
    for n, text in zip(asked, texts, strict=True):
        matches.append(text.strip() in questions[n].answers)
        said[n] = {"answer": text.strip(), "right": matches[-1]}
    lengths = iter([len(context) + len(choice) for context, choice in pairs])
    long = [max(next(lengths) for _ in questions[n].choices) > answerer.longest for n in chosen]
    long += [len(each.prompt) > answerer.room(max_tokens) for each in wanted]
    figures = {"exact_match": matches, "acc": by_sum, "acc_norm": by_letter}
    shares = [sum(values) / len(values) if values else None for values in figures.values()]
    errors = {name: _error(values) for name, values in figures.items() if values}
    exact_match, acc, acc_norm = shares
    return Score(exact_match, acc, acc_norm, len(asked), len(chosen), errors, said, sum(long))


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _error(values: Sequence[bool]) -> float:
    """The standard error of a mean."""
    mean = sum(values) / len(values)
    return math.sqrt(mean * (1 - mean) / (len(values) - 1)) if len(values) > 1 else math.nan


def _pair(
    answerer: Answerer, question: Question, choice: str, template: ChatTemplate | None
) -> tuple[Sequence[int], Sequence[int]]:
    if template is None:
        return answerer.encode_pair(question.text, f" {choice}")
    before = answerer.tokenizer.encode(_prompt(question, template))
    whole = answerer.tokenizer.encode(_prompt(question, template) + choice)
    return before, whole[len(before) :]


def _wanted(answerer: Answerer, question: Question, max_tokens: int, template: ChatTemplate | None) -> Wanted:
    if template is None:
        return Wanted(answerer.encode(question.text), max_tokens, question.until)
    return Wanted(answerer.tokenizer.encode(_prompt(question, template)), max_tokens)


def _prompt(question: Question, template: ChatTemplate) -> str:
    return template.render([{"role": "user", "content": question.text}])
