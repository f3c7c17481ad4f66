"""The parameters common to both endpoints: the fields that OpenAI's completions and chat share, and those that servers of open
models have added (top_k, min_p, repetition_penalty, ignore_eos, stop_token_ids, guided_…, priority), converted to the engine's
types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.serve.grammar import Form, Grammars
from shardwise.serve.request import Request, Sampling
from shardwise.serve.server.errors import ApiError
from shardwise.serve.server.fields import Fields, kind
from shardwise.serve.server.limits import Limits
from shardwise.serve.server.model import Model

# Fields for OpenAI's own servers, which store, bill or route by them.
IGNORED = (
    "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prediction",
    "verbosity", "reasoning_effort",
)  # fmt: skip
SEEDS = 2**63
TOKENS = 2**31


@dataclass(frozen=True)
class Ask:
    """The parameters of a request."""

    sampling: Sampling
    n: int
    max_tokens: int | None
    """None: as many as the model has room for."""
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    ignore_end: bool
    stream: bool
    include_usage: bool
    user: str
    priority: int
    form: Form | None
    problem: str = field(default="response_format", repr=False)
    """The field that specified the form."""

    def requests(self, name: str, prompts: Sequence[Sequence[int]], longest: int, grammars: Grammars) -> list[Request]:
        """The requests to the engine, one for each prompt. `longest` is the largest number of tokens in a sequence."""
        return [
            Request(
                id=f"{name}-{number}",
                prompt=tuple(prompt),
                # An answer of no tokens, which only echoes the prompt, is computed as an answer of one token.
                max_tokens=max(1, self._room(len(prompt), longest)),
                sampling=self.sampling,
                n=self.n,
                stop_tokens=self.stop_tokens,
                ignore_end=self.ignore_end,
                priority=self.priority,
                user=self.user,
                grammars=() if self.form is None else grammars.make(self.form, self.n),
            )
            for number, prompt in enumerate(prompts)
        ]

    def _room(self, prompt: int, longest: int) -> int:
        wanted = longest - prompt if self.max_tokens is None else self.max_tokens
        if prompt + max(1, wanted) <= longest:
            return wanted
        message = (
            f"This model's maximum context length is {longest} tokens; the prompt has {prompt} and the answer is to have up to "
            f"{max(1, wanted)}. Make one of them shorter."
        )
        raise ApiError(400, message, "max_tokens" if prompt < longest else "prompt", "context_length_exceeded")


def read_model(fields: Fields, model: Model) -> None:
    """Refuse requests for another model."""
    name = fields.text("model", model.name, most=4096)
    if name != model.name:
        raise ApiError(
            404, f"The model '{name[:200]}' does not exist; this is '{model.name}'", "model", "model_not_found"
        )


def read_ask(
    fields: Fields, model: Model, vocab: int, limits: Limits, max_tokens: int | None, logprobs: int | None, user: str
) -> Ask:
    """The common fields. The endpoint itself reads `max_tokens` and `logprobs`. `user`: the name that the key gives, if any."""
    stream = fields.flag("stream")
    options = fields.inner("stream_options")
    if options is not None and not stream:
        raise fields.wrong("stream_options", "is only for a request with stream = true")
    include_usage = options is not None and options.flag("include_usage")
    if options is not None:
        options.ignore("include_obfuscation")
        options.end()
    fields.ignore(*IGNORED)
    form, named = _form(fields)
    own_name = fields.text("user")
    # The model's own end tokens are ignored, but never the stop tokens that the request names itself.
    goes_on, own = fields.flag("ignore_eos"), _stop_tokens(fields, vocab)
    return Ask(
        sampling=_sampling(fields, model, vocab, logprobs),
        n=fields.whole("n", 1, 1, limits.choices),
        max_tokens=max_tokens,
        stops=_stops(fields, limits.stops),
        stop_tokens=own if goes_on else model.ends | own,
        ignore_end=goes_on and not own,
        stream=stream,
        include_usage=include_usage,
        user=user or own_name,
        # Lower goes first, and 0 is the default, so that nobody can overtake requests without a priority.
        priority=fields.whole("priority", 0, 0, TOKENS),
        form=form,
        problem=named,
    )


def _sampling(fields: Fields, model: Model, vocab: int, logprobs: int | None) -> Sampling:
    usual = model.recommended
    temperature = fields.number("temperature", usual.get("temperature", 1.0), 0.0, 2.0)
    top_p = fields.number("top_p", usual.get("top_p", 1.0), 0.0, 1.0)
    top_k = fields.whole("top_k", int(usual.get("top_k", 0)), -1, TOKENS)
    return Sampling(
        # top_p = 0 keeps only the likeliest token, which is the same as temperature 0.
        temperature=temperature if top_p > 0 else 0.0,
        top_k=max(0, top_k),
        top_p=top_p or 1.0,
        min_p=fields.number("min_p", usual.get("min_p", 0.0), 0.0, 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", usual.get("repetition_penalty", 1.0), 1e-3, 100.0),
        seed=fields.maybe_whole("seed", -SEEDS, SEEDS - 1),
        logit_bias=_bias(fields, vocab),
        logprobs=logprobs,
    )


def _bias(fields: Fields, vocab: int) -> dict[int, float]:
    inner = fields.inner("logit_bias")
    if inner is None:
        return {}
    given: dict[str, Any] = fields.get("logit_bias")
    if len(given) > 1024:
        raise fields.wrong("logit_bias", f"has {len(given)} tokens; at most 1024 are taken")
    found = {}
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 12 and int(name) < vocab):
            raise fields.wrong(
                "logit_bias", f'has "{name[:50]}", which is not a token of this model (0 to {vocab - 1})'
            )
        found[int(name)] = inner.number(name, 0.0, -100.0, 100.0)
    return found


def _stops(fields: Fields, most: int) -> tuple[str, ...]:
    given = fields.get("stop")
    texts = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise fields.wrong("stop", f"must be a string or an array of strings, not {kind(given)}", "invalid_type")
    if len(texts) > most or any(len(text) > 1024 for text in texts):
        raise fields.wrong("stop", f"may have {most} strings of 1024 characters, no more")
    # An empty stop string would end every answer at once; clients send it to mean none.
    return tuple(dict.fromkeys(text for text in texts if text))


def _stop_tokens(fields: Fields, vocab: int) -> frozenset[int]:
    given = fields.get("stop_token_ids")
    if given is None:
        return frozenset()
    known = isinstance(given, list) and len(given) <= 1024 and all(type(t) is int and 0 <= t < vocab for t in given)
    if not known:
        raise fields.wrong("stop_token_ids", f"must be an array of at most 1024 tokens, each from 0 to {vocab - 1}")
    return frozenset(given)


def _form(fields: Fields) -> tuple[Form | None, str]:
    """The form that an answer must have, and the field that specified it."""
    found: list[tuple[Form, str]] = []
    if (wanted := fields.inner("response_format")) is not None:
        form = _response_format(wanted)
        found += [(form, "response_format")] if form else []
    for name in ("json", "regex", "choice", "grammar"):
        value = fields.get(f"guided_{name}")
        if value is not None:
            found.append((_guided(fields, name, value), f"guided_{name}"))
    if len(found) > 1:
        raise fields.wrong(found[1][1], f"cannot be used together with {found[0][1]}")
    return found[0] if found else (None, "")


def _response_format(wanted: Fields) -> Form | None:
    name = wanted.one_of("type", "", ("text", "json_object", "json_schema"))
    form = Form("json", {"type": "object"}) if name == "json_object" else None
    if name == "json_schema":
        inner = wanted.inner("json_schema")
        if inner is None:
            raise wrong_missing(wanted, "json_schema")
        inner.ignore("name", "description", "strict")
        schema = inner.get("schema")
        if not isinstance(schema, dict):
            raise inner.wrong("schema", f"must be an object, not {kind(schema)}", "invalid_type")
        inner.end()
        form = Form("json", schema)
    wanted.end()
    return form


def _guided(fields: Fields, name: str, value: Any) -> Form:
    full = f"guided_{name}"
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise fields.wrong(full, "must be an array of strings", "invalid_type")
        return Form("choice", value)
    if name == "json" and not isinstance(value, dict):
        raise fields.wrong(full, f"must be an object, not {kind(value)}", "invalid_type")
    if name == "regex":
        return Form("regex", fields.text(full, most=2**16))
    return Form("json", value) if name == "json" else Form("grammar", fields.text(full, most=2**16))


def wrong_missing(fields: Fields, name: str) -> ApiError:
    """The error for a field that must be there."""
    return fields.wrong(name, "is missing", "missing_required_parameter")
