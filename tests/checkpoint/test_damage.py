"""What can happen to a checkpoint's files, each reported in one sentence: any flipped bit, any cut, any missing file, links, names
that lead out of the folder, other people's folders, versions to come."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import pytest
import torch

from shardwise.checkpoint.folder import complete, folder_of_step
from shardwise.checkpoint.format import MANIFEST, checksum, damage, read_manifest, size_and_checksum
from shardwise.checkpoint.job import check_folder
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.resume import resume
from shardwise.cli.main import main
from shardwise.run import UserError
from shardwise.train.step import TrainState

RUN = cases.make_run("dense", {}, layers=1, dtype="float32", keep=5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of steps 1 and 2."""
    out = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        train_state = checkpoint_cases.trained(RUN, step)
        saver = checkpoint_cases.saver_of(train_state, out)
        saver.save(train_state)
        assert saver.finish() == ""
    return out


@pytest.fixture
def out(saved: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "out"))


def test_any_flipped_bit_is_found(out: Path) -> None:
    generator = random.Random(0)
    folder = folder_of_step(out, 2)
    files = sorted(folder.iterdir())
    assert {f.name for f in files} == {
        MANIFEST, "rank-00000.safetensors", "run.toml", "shardwise_tokenizer.json"
    }  # fmt: skip
    for path in files:
        whole = path.read_bytes()
        for _ in range(40):
            content, place = bytearray(whole), generator.randrange(len(whole))
            content[place] ^= 1 << generator.randrange(8)
            path.write_bytes(content)
            assert list(damage(folder)), f"{path.name} byte {place}"
        path.write_bytes(whole)
    assert list(damage(folder)) == []


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors", "run.toml", "shardwise_tokenizer.json"])
@pytest.mark.parametrize("how", ["cut", "longer", "empty", "missing", "link", "folder", "pipe"])
def test_a_file_that_is_not_what_was_written_leads_to_the_checkpoint_before(out: Path, name: str, how: str) -> None:
    path = folder_of_step(out, 2) / name
    content = path.read_bytes()
    path.unlink()
    if how in ("cut", "longer", "empty"):
        path.write_bytes({"cut": content[:-2], "longer": content + b"\0", "empty": b""}[how])
    elif how == "link":  # the right bytes, but they belong to somebody else
        (out / "elsewhere").write_bytes(content)
        path.symlink_to(out / "elsewhere")
    elif how == "folder":
        path.mkdir()
    elif how == "pipe":  # whoever opens it as if it were a file waits for ever
        os.mkfifo(path)
    said: list[str] = []
    train_state = TrainState(RUN)
    found = resume(train_state, out, checkpoint_cases.DATA, said.append)
    assert found is not None
    assert found.step == train_state.step == 1
    assert len(said) == 2
    assert said[0].startswith(f"warning: {folder_of_step(out, 2)}")
    assert said[1] == "step-00000002 is set aside as damaged-step-00000002; going on from step-00000001, the one before"
    assert [p.name for p in complete(out)] == ["step-00000001"]


def test_when_none_verifies_the_run_does_not_begin_anew_by_itself(out: Path) -> None:
    for folder in complete(out):
        (folder / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint of .* verifies") as caught:
        resume(TrainState(RUN), out, checkpoint_cases.DATA, lambda _: None)
    assert len(caught.value.problems) == 3
    assert len(complete(out)) == 2


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and give it the checksum that fits."""
    content = json.loads((folder / MANIFEST).read_text())
    content.pop("crc")
    change(content)
    content["crc"] = checksum(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    (folder / MANIFEST).write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "..", "a/b", ".hidden", ""])
def test_a_name_cannot_lead_out_of_the_folder(out: Path, name: str) -> None:
    folder = folder_of_step(out, 2)
    forge(folder, lambda content: content["files"].update({name: [0, 0]}))
    with pytest.raises(UserError, match="lie in its own folder"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "nonsense", "[" * 100_000, '{"format": 3}', '{"format": 2}', '{"format": "3"}', "\xff"]
)
def test_a_manifest_that_is_none(out: Path, text: str) -> None:
    (folder_of_step(out, 2) / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError):
        read_manifest(folder_of_step(out, 2))


def set_header(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the header of a file of shards and the boxes in it, and make the manifest believe it."""
    path = folder / "rank-00000.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    boxes = json.loads(header["__metadata__"]["shards"])
    change(header, boxes)
    header["__metadata__"]["shards"] = json.dumps(boxes)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    entry = size_and_checksum(path)
    forge(folder, lambda manifest: manifest["files"].update({path.name: entry}))


FIRST = "model/embed.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda h, b: b[FIRST].update(offset=[1, 0]), "does not say which shards"),  # beyond the tensor
        (lambda h, b: b[FIRST].update(offset=[-1, 0]), "does not say which shards"),
        (lambda h, b: b[FIRST].update(shape=[1]), "does not say which shards"),
        (lambda h, b: b[FIRST].update(crc32=7), "does not say which shards"),
        (lambda h, b: b.pop(FIRST), "does not say which shards"),
        (lambda h, b: h.update({"other": h.pop(FIRST)}), "does not say which shards"),
        (
            lambda h, b: b.update({"other": b[FIRST]}) or h.update({"other": h[FIRST]}),
            "not a complete safetensors file",
        ),
        (lambda h, b: b[FIRST].update(shape=[10**30, 10**30]), "does not hold the whole"),
        (lambda h, b: h[FIRST].update(dtype="pickle"), "not a complete safetensors file"),
        (lambda h, b: h[FIRST].update(data_offsets=[8, 16]), "not a complete safetensors file"),
        (lambda h, b: h.pop(FIRST), "not a complete safetensors file"),
    ],
)
def test_a_header_that_lies(out: Path, change: Callable[..., None], sentence: str) -> None:
    folder = folder_of_step(out, 2)
    set_header(folder, change)
    with pytest.raises(UserError, match=sentence):
        open_checkpoint(folder)


def test_reading_a_tensor_holds_its_bytes_against_the_checksum(out: Path) -> None:
    path = folder_of_step(out, 2) / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    reader = open_checkpoint(folder_of_step(out, 2))
    content[reader.shards["embed.weight"][0].begin] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bytes of model/embed\.weight are not those written"):
        reader.get("embed.weight")
    assert torch.isfinite(reader.get("norm.weight")).all()


def command(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main([str(a) for a in arguments])
    return code, capsys.readouterr().err


def test_a_version_to_come_is_refused_not_passed_over(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge(folder_of_step(out, 2), lambda content: content.update(format=99))
    with pytest.raises(UserError, match="newer version"):
        resume(TrainState(RUN), out, checkpoint_cases.DATA, lambda _: None)
    assert len(complete(out)) == 2
    for verb in (["checkpoints", out], ["generate", out, "--prompt", "a"]):
        code, said = command(*verb, capsys=capsys)
        assert code == 2 if verb[0] == "generate" else code == 1
        assert "Traceback" not in said


def test_an_earlier_version_is_refused_with_how_to_go_on(out: Path) -> None:
    forge(folder_of_step(out, 2), lambda content: content.update(format=2))
    (out / ".lock").touch()
    for way in (lambda: resume(TrainState(RUN), out, checkpoint_cases.DATA, print), lambda: check_folder(RUN, out)):
        with pytest.raises(UserError, match=r"Shardwise 0\.1 was the last to read.*convert to-hf"):
            way()
    assert len(complete(out)) == 2


def test_the_verb_lists_step_size_layout_and_whether_they_verify(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(out), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["step"] for each in listed] == [1, 2]
    for each in listed:
        folder = Path(each["folder"])
        assert each["bytes"] == sum(p.stat().st_size for p in folder.iterdir() if p.name != MANIFEST)
        assert each["verifies"]
        assert each["layout"] == {}
    (folder_of_step(out, 2) / "run.toml").unlink()
    assert main(["checkpoints", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "run.toml: is missing" in shown
    assert main(["checkpoints", str(folder_of_step(out, 1))]) == 0


def test_folders_that_are_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.toml").write_text("[train]\nsteps = 1\n")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("")
    code, said = command("train", tmp_path / "r.toml", "--out", tmp_path / "foreign", capsys=capsys)
    assert code == 2
    assert said == (
        f"error: {tmp_path / 'foreign'}: holds thesis.tex but no run.toml, so it is no run folder; give --out a new one\n"
    )
    code, said = command("train", tmp_path / "r.toml", "--out", tmp_path / "r.toml", capsys=capsys)
    assert (code, said) == (2, f"error: {tmp_path / 'r.toml'}: is a file, not a folder\n")
    for name, sentence in (("foreign", "neither a run folder nor a checkpoint"), ("none", "no such folder")):
        code, said = command("checkpoints", tmp_path / name, capsys=capsys)
        assert code == 2
        assert sentence in said


def test_a_read_only_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text("[train]\nsteps = 1\n")
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        # Root may write anywhere, so the file system's answer is given in its place.
        if str(path).startswith(str(tmp_path / "out")) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, os.strerror(30), str(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    code, said = command("train", tmp_path / "r.toml", "--out", tmp_path / "out", capsys=capsys)
    assert (code, said) == (2, f"error: {tmp_path / 'out'}: cannot be written: Read-only file system\n")
