"""Tokenizers give back what they were given, save themselves, and say what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from shardwise.run import UserError


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text])[0].tolist() == ids
    assert all(i < 256 for i in ids)


def test_bytes_decode_anything() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab, tokenizer.end) == (257, 256)
    assert tokenizer.decode([72, 105, 256, 0xE2, 0x82]) == "Hi�"
    assert tokenizer.decode([72, 300]) == "H"


def test_json_round_trip(json_tokenizer: JsonTokenizer, texts: list[str]) -> None:
    batch = json_tokenizer.encode_batch(texts)
    for text, ids in zip(texts, batch, strict=True):
        assert ids.tolist() == json_tokenizer.encode(text)
        assert json_tokenizer.decode([*ids, json_tokenizer.end]) == text
    # The file asks for truncation to 8 and padding to 8; neither may touch the data.
    assert len(batch[0]) > 8
    assert len(json_tokenizer.encode("a")) == 1


def test_vocabulary_counts_to_the_largest_number(trained: bytes) -> None:
    content = json.loads(trained)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 1000, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 1000
    tokenizer = JsonTokenizer(json.dumps(content).encode())
    assert tokenizer.vocab == 1001
    assert tokenizer.decode([1005, tokenizer.encode("a")[0]]) == "a"


def test_save_and_load(tmp_path: Path, json_tokenizer: JsonTokenizer) -> None:
    ByteTokenizer().save(tmp_path / "bytes")
    assert isinstance(load_tokenizer(tmp_path / "bytes"), ByteTokenizer)
    json_tokenizer.save(tmp_path / "json")
    again = load_tokenizer(tmp_path / "json")
    assert again.digest == json_tokenizer.digest
    assert again.encode("fox jumps") == json_tokenizer.encode("fox jumps")
    assert load_tokenizer(tmp_path / "json" / "tokenizer.json").digest == again.digest


def _with_special(trained: bytes, *names: str) -> bytes:
    content = json.loads(trained)
    first = content["added_tokens"][0]
    content["added_tokens"] = [{**first, "id": 500 + i, "content": n} for i, n in enumerate(names)]
    content["model"]["vocab"] = {k: v for k, v in content["model"]["vocab"].items() if k != "<|endoftext|>"}
    content["model"]["vocab"].update({n: 500 + i for i, n in enumerate(names)})
    return json.dumps(content).encode()


@pytest.mark.parametrize("name", ["</s>", "<eos>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|im_end|>"])
def test_end_by_its_usual_names(trained: bytes, name: str) -> None:
    assert JsonTokenizer(_with_special(trained, "<s>", name)).end == 501


def test_end_named_by_the_user_is_kept(tmp_path: Path, trained: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(_with_special(trained, "</s>", "<stop>"))
    assert load_tokenizer(path).end == 500
    named = load_tokenizer(path, "<stop>")
    assert named.end == 501
    named.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").end == 501
    assert load_tokenizer(tmp_path / "saved").digest != load_tokenizer(path).digest


def test_end_from_a_published_config(tmp_path: Path, trained: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(_with_special(trained, "</s>", "<odd>"))
    for eos in ("<odd>", {"content": "<odd>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(tmp_path).end == 501
        assert load_tokenizer(tmp_path / "tokenizer.json").end == 501
    (tmp_path / "tokenizer_config.json").write_text("{]")
    assert load_tokenizer(tmp_path).end == 500


def test_no_end_is_told(trained: bytes) -> None:
    with pytest.raises(UserError, match="name it with --end"):
        JsonTokenizer(_with_special(trained, "<s>"))
    with pytest.raises(UserError, match=r'no token "<\|endoftxt\|>".*did you mean <\|endoftext\|>'):
        JsonTokenizer(trained, end="<|endoftxt|>")
    with pytest.raises(UserError, match="own end"):
        load_tokenizer("byte", "</s>")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"version": "1.0"}', b"[]"])
def test_a_corrupt_file_gets_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json: is not a tokenizer"):
        load_tokenizer(path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such tokenizer"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(UserError, match="its tokenizer is unknown"):
        load_tokenizer(tmp_path)
    for marker in ("{", "[]", '{"kind": "word"}', '{"kind": "json", "end": 3}'):
        (tmp_path / "shardwise_tokenizer.json").write_text(marker)
        with pytest.raises(UserError, match="does not say"):
            load_tokenizer(tmp_path)
