"""OpenAI's own client against the server: every parameter that is supported, streams, errors."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine, letters, says
from late import Late
from patience import HANG_SECONDS
from running import Running, exchange, model_of, post, running, until
from tokenizers_of_each_kind import tokenizer_of

from shardwise.data.chat.template import ChatTemplate
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.serve.request import Output, Request
from shardwise.serve.server.limits import Limits

openai: Any = Late("openai")

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(script=letters, max_tokens=2048)) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(server: Running) -> Iterator[None]:
    yield
    server.idle()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def client_of(server: Running, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=HANG_SECONDS)


def complete(client: openai.OpenAI, **settings: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": "hi", "max_tokens": 5, **settings})


def chat(client: openai.OpenAI, **settings: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 5, **settings})


def last(server: Running) -> Request:
    return server.engine.requests[-1]


def joined(stream: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """The texts of a stream by choice, how each ended, and the chunks."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    chunks = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in ends, "nothing follows the end of a choice"
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return texts, ends, chunks


def test_a_completion(client: openai.OpenAI, server: Running) -> None:
    answer = complete(client)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].text == bytes(letters(last(server), 0)).decode()
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 5, 7)
    assert last(server).prompt == tuple(b"hi")


def test_a_chat(client: openai.OpenAI, server: Running) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == bytes(letters(last(server), 0)).decode()
    assert bytes(last(server).prompt).decode() == "system: Be brief.\nuser: hello\nassistant:"
    assert answer.usage.prompt_tokens_details.cached_tokens == 32


@pytest.mark.parametrize("kind", [complete, chat])
def test_a_stream_is_the_answer_in_parts(client: openai.OpenAI, kind: Any) -> None:
    whole = kind(client, n=3, max_tokens=20, seed=1)
    wanted = {c.index: c.text if hasattr(c, "text") else c.message.content for c in whole.choices}
    texts, ends, chunks = joined(kind(client, n=3, max_tokens=20, seed=1, stream=True))
    assert texts == wanted
    assert len(set(texts.values())) == 3
    assert ends == {0: "length", 1: "length", 2: "length"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("kind", [complete, chat])
def test_the_usage_of_a_stream(client: openai.OpenAI, kind: Any) -> None:
    *chunks, end = joined(kind(client, stream=True, stream_options={"include_usage": True}))[2]
    assert end.choices == []
    assert end.usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("abc", [b"abc"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
        ("", [[256]]),
        (["", [97]], [[256], b"a"]),
    ],
)
def test_every_form_of_a_prompt(client: openai.OpenAI, server: Running, prompt: Any, tokens: list[Any]) -> None:
    answer = complete(client, prompt=prompt, n=2)
    asked = server.engine.requests[-len(tokens) :]
    assert [each.prompt for each in asked] == [tuple(each) for each in tokens]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(tokens)))
    expected = [bytes(letters(each, index)).decode() for each in asked for index in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(map(len, tokens))


def test_what_is_asked_of_sampling_reaches_the_engine(client: openai.OpenAI, server: Running) -> None:
    known: dict[str, Any] = dict(temperature=0.25, top_p=0.5, presence_penalty=-1.5, frequency_penalty=1.25, seed=-7)
    more: dict[str, Any] = dict(top_k=11, min_p=0.125, repetition_penalty=1.5)
    for kind in (complete, chat):
        kind(client, **known, logit_bias={"5": -100, "7": 2.5}, user="me", extra_body={**more, "priority": 3})
        asked = last(server)
        assert {name: getattr(asked.sampling, name) for name in known | more} == known | more
        assert asked.sampling.logit_bias == {5: -100.0, 7: 2.5}
        assert (asked.user, asked.priority, asked.max_tokens, asked.ignore_end) == ("me", 3, 5, False)
    complete(client, top_p=0, extra_body={"top_k": -1, "ignore_eos": True, "stop_token_ids": [9]})
    assert (last(server).sampling.temperature, last(server).sampling.top_k) == (0.0, 0)
    for ignored, own, stops in ((True, [9], {9}), (True, [], set()), (False, [9], {9, 256}), (False, [], {256})):
        complete(client, extra_body={"ignore_eos": ignored, "stop_token_ids": own})
        asked = last(server)
        assert (frozenset() if asked.ignore_end else asked.stop_tokens) == stops


def test_a_seed_repeats(client: openai.OpenAI) -> None:
    texts = [complete(client, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_how_long_an_answer_is(client: openai.OpenAI, server: Running) -> None:
    assert complete(client, max_tokens=openai.omit).usage.completion_tokens == 16
    chat(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert last(server).max_tokens == 3
    chat(client, max_tokens=openai.omit)
    assert last(server).max_tokens == 2048 - len(last(server).prompt)


def test_stop_strings(client: openai.OpenAI, server: Running) -> None:
    text = complete(client, max_tokens=40, seed=3).choices[0].text
    for stop in (text[10:12], [text[20:25], text[10:13]], [""]):
        for stream in (False, True):
            answer = complete(client, max_tokens=40, seed=3, stop=stop, stream=stream)
            texts, ends, _ = (
                joined(answer) if stream else ({0: answer.choices[0].text}, {0: answer.choices[0].finish_reason}, [])
            )
            cut = text.index(stop if isinstance(stop, str) else stop[-1]) if stop != [""] else 40
            assert (texts, ends) == ({0: text[:cut]}, {0: "length" if stop == [""] else "stop"})
    answer = complete(client, max_tokens=2000, n=2, seed=3, stop=text[10:13])
    assert answer.choices[0].text == text[:10]
    server.idle()


class SeveralAtOnce(FakeEngine):
    """As an engine whose guesses were right: seven tokens each time."""

    def _next(self, each: Any) -> Output:
        made = [super()._next(each)]
        while len(made) < 7 and made[-1].finish is None:
            made.append(super()._next(each))
        return replace(made[-1], tokens=tuple(token for output in made for token in output.tokens))


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_after_a_stop_string_are_not_counted(stream: bool) -> None:
    script = says("one, two, three, four")
    with running(SeveralAtOnce(script=script)) as server, client_of(server) as client:
        more: dict[str, Any] = dict(stream=True, stream_options={"include_usage": True}) if stream else {}
        answer = complete(client, n=2, stop=["wo, "], max_tokens=20, **more)
        texts, _, chunks = joined(answer if stream else [answer])
        assert texts == {0: "one, t", 1: "one, t"}
        assert chunks[-1].usage.completion_tokens == 2 * len("one, two, ")
        assert server.context.metrics.answer_tokens == 2 * len("one, two, ")


def test_tokens_that_end_an_answer_have_no_text() -> None:
    with running(FakeEngine(script=says("hällo"))) as server, client_of(server) as client:
        answer = complete(client, max_tokens=50, logprobs=1)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hällo", "stop")
        assert answer.usage.completion_tokens == 7
        assert answer.choices[0].logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa4", "l", "l", "o", "<|endoftext|>"]
        assert answer.choices[0].logprobs.text_offset == [0, 1, 1, 2, 3, 4, 5]
        assert complete(client, max_tokens=2).choices[0].text == "h\ufffd"
        texts, _, _ = joined(complete(client, max_tokens=50, stream=True))
        assert texts == {0: "hällo"}


def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    for stream in (False, True):
        answer = complete(client, logprobs=3, max_tokens=8, seed=5, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for choice in choices:
            for name, values in found.items():
                values.extend(getattr(choice.logprobs, name))
        assert "".join(found["tokens"]) == "".join(choice.text for choice in choices)
        assert found["text_offset"] == list(range(8))
        assert all(value < 0 for value in found["token_logprobs"])
        assert all(
            token in top and len(top) >= 3 for token, top in zip(found["tokens"], found["top_logprobs"], strict=True)
        )


def test_logprobs_end_with_the_text_at_a_stop_string(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=30, seed=6).choices[0].text
    for stream in (False, True):
        answer = complete(client, max_tokens=30, seed=6, stop=text[9:14], logprobs=0, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
        assert "".join(tokens) == "".join(choice.text for choice in choices) == text[:9]


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=2).choices[0]
    assert [each.token for each in answer.logprobs.content] == list(answer.message.content)
    assert [bytes(each.bytes).decode() for each in answer.logprobs.content] == list(answer.message.content)
    assert all(len(each.top_logprobs) == 2 for each in answer.logprobs.content)
    assert chat(client).choices[0].logprobs is None
    streamed = [choice.logprobs for chunk in chat(client, logprobs=True, stream=True) for choice in chunk.choices]
    content = [token for each in streamed if each for token in each.content]
    assert len(content) == 5
    assert all(token.top_logprobs == [] for token in content)


def test_echo(client: openai.OpenAI, server: Running) -> None:
    answer = complete(client, prompt="früh", echo=True, logprobs=2, max_tokens=3, n=2)
    for index, choice in enumerate(answer.choices):
        assert choice.text == "früh" + bytes(letters(last(server), index)).decode()
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value is not None for value in choice.logprobs.token_logprobs[1:])
        assert choice.logprobs.text_offset == [0, 1, 2, 2, 3, 4, 5, 6]
    texts, _, _ = joined(complete(client, prompt="früh", echo=True, max_tokens=3, stream=True))
    assert texts[0].startswith("früh")
    alone = complete(client, prompt="abc", echo=True, logprobs=1, max_tokens=0)
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == ("abc", "length")
    assert alone.usage.completion_tokens == 0
    assert len(alone.choices[0].logprobs.tokens) == 3


class CountingTokenizer(ByteTokenizer):
    """Counts the pieces that each thread asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: Counter[int] = Counter()

    def piece(self, token: int, first: bool = False) -> bytes:
        self.pieces[threading.get_ident()] += 1
        return super().piece(token, first)


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_is_echoed_without_holding_others_up(stream: bool) -> None:
    """It is read once for all of its choices, and not in the thread that serves everybody."""
    tokenizer, prompt = CountingTokenizer(), "früh " * 400
    with running(FakeEngine(script=letters), model_of(tokenizer=tokenizer)) as server, client_of(server) as client:
        answer = complete(client, prompt=prompt, echo=True, logprobs=1, n=4, max_tokens=3, stream=stream)
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        length, loop = len(prompt.encode()), server.thread.ident
        for index in range(4):
            own = [choice for choice in choices if choice.index == index]
            told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            for choice in own:
                for name, values in told.items():
                    values += getattr(choice.logprobs, name)
            text = prompt + bytes(letters(last(server), index)).decode()
            assert "".join(choice.text for choice in own) == text
            assert [len(values) for values in told.values()] == [length + 3] * 4
            assert told["text_offset"][-3:] == [len(prompt), len(prompt) + 1, len(prompt) + 2]
            assert told["text_offset"][length - 1] == len(prompt) - 1
        assert tokenizer.pieces[loop] < 200
        assert sum(tokenizer.pieces.values()) < 6 * length


def test_json_of_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for kind in ("byte", "byte-level", "sentencepiece"):
        tokenizer = tokenizer_of(kind)
        ends = frozenset([tokenizer.end])
        engine = FakeEngine(vocab=tokenizer.vocab + 5, end=tokenizer.end)
        with running(engine, model_of(tokenizer=tokenizer, ends=ends)) as server, client_of(server) as client:
            answer = chat(client, response_format=wanted, n=3, max_tokens=500)
            for choice in answer.choices:
                found = json.loads(choice.message.content)
                assert found["name"] in ("a", "b")
                assert 0 <= found["age"] <= 9
                assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("more", "check"),
    [
        ({"guided_choice": ["yes", "no", "a b-c"]}, lambda text: text in ("yes", "no", "a b-c")),
        (
            {"guided_regex": "[0-9]{3}-[a-f]"},
            lambda text: text[:3].isdigit() and text[3] == "-" and text[4] in "abcdef",
        ),
        ({"guided_grammar": 'start: "<" /[a-c]{2}/ ">"'}, lambda text: text[0] == "<" and text[3] == ">"),
        (
            {"guided_json": {"type": "array", "items": {"const": 1}, "minItems": 2}},
            lambda text: json.loads(text)[:2] == [1, 1],
        ),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"response_format": {"type": "text"}}, lambda text: len(text) == 400),
    ],
)
def test_answers_of_a_given_form(client: openai.OpenAI, more: dict[str, Any], check: Any) -> None:
    assert check(complete(client, max_tokens=400, extra_body=more).choices[0].text)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"9": 101}}, "logit_bias.9"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": ["x"] * 500}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type"),
        ({"extra_body": {"response_format": {"type": "json_schema"}}}, "response_format.json_schema"),
        ({"extra_body": {"guided_regex": "(["}}, "guided_regex"),
        ({"extra_body": {"guided_json": {"type": "nonsense"}}}, "guided_json"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"extra_body": {"guided_choice": ["a"], "guided_regex": "b"}}, "guided_choice"),
        ({"extra_body": {"bogus": 1}}, "bogus"),
    ],
)
def test_mistakes_name_their_field(client: openai.OpenAI, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        complete(client, **settings)
    assert wrong.value.param == param
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.code


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.content.type",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_mistakes_in_a_chat(client: openai.OpenAI, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(client, **settings)
    assert wrong.value.param == param


def test_fields_that_change_nothing(client: openai.OpenAI) -> None:
    parts: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"}
    ]
    assert chat(
        client, messages=parts, store=False, metadata={"a": "b"}, service_tier="auto", tools=[], tool_choice="none"
    )
    assert complete(client, best_of=1, suffix="", user=None, stop=None)


def test_another_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as wrong:
        complete(client, model="gpt-4")
    assert wrong.value.code == "model_not_found"


def test_keys() -> None:
    with running(keys=("first", "second")) as server:
        for key in ("wrong", "firs", "first2", "first second"):
            with client_of(server, "x") as client, pytest.raises(openai.AuthenticationError) as refused:
                complete(client, extra_headers={"Authorization": f"Bearer {key}"})
            assert refused.value.code == "invalid_api_key"
        users = []
        for key in ("first", "second"):
            with client_of(server, "x") as client:
                complete(client, user="me", extra_headers={"Authorization": f"Bearer {key}"})
                users.append(last(server).user)
        assert users == ["key 0", "key 1"]


def test_a_full_queue_is_429_with_when_to_come_again() -> None:
    with (
        running(FakeEngine(max_sequences=1, delay=0.001), limits=Limits(waiting=2)) as server,
        client_of(server) as client,
    ):
        streams = [complete(client, max_tokens=4000, stream=True)]
        next(iter(streams[0]))
        waiting = [threading.Thread(target=lambda: complete(client, max_tokens=1)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        until(lambda: server.context.service.waiting == 2)
        with pytest.raises(openai.RateLimitError) as full:
            complete(client, max_tokens=1)
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "queue_full"
        streams[0].close()
        for thread in waiting:
            thread.join()
        server.idle()


def test_an_engine_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with running(FakeEngine(script=letters, fails_at=5)) as server, client_of(server) as client:
        with pytest.raises(openai.APIError, match="engine has failed"):
            joined(complete(client, max_tokens=50, stream=True))
        with pytest.raises(openai.InternalServerError) as failed:
            complete(client)
        assert failed.value.status_code == 503
    assert "told to fail" in capfd.readouterr().err


def test_a_template_that_refuses() -> None:
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('the user must begin') }}{% endif %}ok"
    )
    with running(FakeEngine(script=letters), model_of(template=template)) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="the user must begin"):
            chat(client)
        assert chat(client, messages=HELLO[1:])


@pytest.mark.parametrize(
    "more",
    [
        {"content": "\ud800"},
        {"name": "\ud800"},
        {"tool_call_id": "\udc00"},
        {"reasoning_content": "\ud800"},
        {"tool_calls": [{"type": "function", "function": {"name": "\ud800", "arguments": "{}"}}]},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": "\ud800"}'}}]},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}]},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": r'{"\udc00\ud800": 1}'}}]},
    ],
)
def test_half_a_surrogate_pair_in_a_message(more: dict[str, Any]) -> None:
    template = ChatTemplate("{% for message in messages %}{{ message | tojson }}{% endfor %}")
    with running(FakeEngine(script=letters), model_of(template=template)) as server:
        body = json.dumps({"messages": [{"role": "assistant", "content": "a", **more}], "max_tokens": 1}).encode()
        response = exchange(server, post("/v1/chat/completions", body))
        assert response.startswith(b"HTTP/1.1 400")
        assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_utf8"


def test_what_a_publisher_recommends_holds_unless_a_request_says_otherwise() -> None:
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "min_p": 0.1}
    with running(FakeEngine(script=letters), model_of(recommended=recommended)) as server, client_of(server) as client:
        complete(client)
        assert {name: getattr(last(server).sampling, name) for name in recommended} == recommended
        complete(client, temperature=1)
        assert last(server).sampling.temperature == 1.0
