"""Files to stores: training rules 3 and 11, rows DS1, PP1, PP2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core.errors import ConfigError, DataError, MissingDependencyError
from astrai_train.data.preprocess import files
from astrai_train.data.preprocess.config import PreprocessConfig
from astrai_train.data.preprocess.part import Summary
from astrai_train.data.preprocess.run import preprocess
from astrai_train.data.store import TokenStore

Run = Callable[..., tuple[TokenStore, Summary]]

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
EOS = 257


@pytest.fixture
def run(tmp_path: Path, byte_tokenizer: Any) -> Run:
    """Preprocess what is given as a file's bytes, or as records of JSON lines; returns store and summary."""

    def make(content: Any, name: str = "in.jsonl", **changes: Any) -> tuple[TokenStore, Summary]:
        data = content if isinstance(content, bytes) else "".join(json.dumps(r) + "\n" for r in content).encode()
        (tmp_path / name).write_bytes(data)
        output = tmp_path / "out"
        config = configure(tmp_path / name, **changes)
        summary = preprocess(config, output, byte_tokenizer, overwrite=True)[""]
        assert not output.with_name("out.partial").exists()
        return TokenStore(output), summary

    return make


def configure(path: Path, **changes: Any) -> PreprocessConfig:
    base = {
        "inputs": [{"paths": [str(path)], "type": changes.pop("file_type", "auto")}],
        "tokenizer": "bytes",
        "format": "text",
        "workers": 0,
    }
    return PreprocessConfig.from_dict(base | changes)


def documents(store: TokenStore, tokenizer: Any, name: str = "input_ids") -> list[str]:
    return [tokenizer.decode(store.read(name, i), skip_special_tokens=False) for i in range(len(store))]


def supervised(store: TokenStore, tokenizer: Any) -> list[str]:
    """The supervised tokens of each row, its stretches apart."""
    rows = []
    for i in range(len(store)):
        ids, mask = store.read("input_ids", i), store.read("mask", i)
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
        parts = [ids[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        rows.append("|".join(tokenizer.decode(part, skip_special_tokens=False) for part in parts))
    return rows


TURNS = [*CHAT["messages"], {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Bye"}]


@pytest.mark.parametrize(
    ("format", "record", "expected"),
    [
        ("messages", {"messages": TURNS}, "Yo<|im_end|>|Bye<|im_end|>"),
        (
            "messages",
            {"messages": [{**m, "weight": 0} if m["content"] == "Yo" else m for m in TURNS]},
            "Bye<|im_end|>",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
            "Yo<|im_end|>",
        ),
        ("alpaca", {"instruction": "Add", "input": "1 1", "output": "2"}, "2<|im_end|>"),
        ("prompt_completion", {"prompt": "1 + 1 =", "completion": " 2"}, " 2<|im_end|>"),
        (
            "prompt_completion",
            {"prompt": TURNS[:3], "completion": TURNS[3:]},
            "Bye<|im_end|>",
        ),
    ],
)
def test_every_format_supervises_its_answers(
    run: Run, byte_tokenizer: Any, format: str, record: dict[str, Any], expected: str
) -> None:
    """Rules 2 and 3: every assistant turn with its end-of-turn token, and nothing else; ids are inference's."""
    store, summary = run([record], format=format)
    assert supervised(store, byte_tokenizer) == [expected]
    ids = store.read("input_ids", 0)
    assert (summary.kept, summary.tokens, summary.supervised) == (1, len(ids), int(store.read("mask", 0).sum()))
    if format == "messages":
        wanted = byte_tokenizer.apply_chat_template(record["messages"], add_generation_prompt=False)
        assert ids.tolist() == wanted
    if format == "alpaca":
        assert "<|im_start|>user\nAdd\n\n1 1<|im_end|>" in documents(store, byte_tokenizer)[0]


def test_other_roles_can_be_supervised(run: Run, byte_tokenizer: Any) -> None:
    store, _ = run([CHAT], format="messages", roles=["user", "assistant"])
    assert supervised(store, byte_tokenizer) == ["Hi<|im_end|>|Yo<|im_end|>"]


def test_text_ends_with_eos_once(run: Run, byte_tokenizer: Any) -> None:
    store, summary = run([{"text": "ab"}, {"text": "cd<|im_end|>"}, {"text": ""}])
    assert documents(store, byte_tokenizer) == ["ab<|im_end|>", "cd<|im_end|>"]
    assert summary.dropped == {"empty text": 1}
    store, _ = run([{"body": "ab"}], fields={"text": "body"}, append_eos=False)
    assert documents(store, byte_tokenizer) == ["ab"]


def test_partial_preference_records_are_dropped(run: Run, byte_tokenizer: Any) -> None:
    """Rows PP1 and PP2: a record without all outputs is dropped before alignment, so the others stay aligned."""
    whole = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(3)]
    partial = [{"prompt": "x", "chosen": "only"}, {"prompt": "x", "rejected": "only"}, {"prompt": "x", "chosen": None}]
    store, summary = run([whole[0], partial[0], whole[1], *partial[1:], whole[2]], format="preference")
    for name, letter in [("prompt", "p"), ("chosen", "c"), ("rejected", "r")]:
        ending = "" if name == "prompt" else "<|im_end|>"
        assert documents(store, byte_tokenizer, name) == [f"{letter}{i}{ending}" for i in range(3)]
    assert summary.dropped == {
        "incomplete pair: no rejected": 1,
        "incomplete pair: no chosen": 1,
        "incomplete pair: no chosen and no rejected": 1,
    }


@pytest.mark.parametrize("explicit", [True, False])
def test_chat_pairs_share_their_prompt(run: Run, byte_tokenizer: Any, explicit: bool) -> None:
    """Rule 10: prompt ids are a common prefix, and those that inference sends."""
    answers = [[{"role": "assistant", "content": text}] for text in ("Bye", "Boo")]
    record = {"prompt": TURNS[:3], "chosen": answers[0], "rejected": answers[1]}
    if not explicit:
        record = {"chosen": TURNS[:3] + answers[0], "rejected": TURNS[:3] + answers[1]}
    store, _ = run([record], format="preference")
    assert store.read("prompt", 0).tolist() == byte_tokenizer.apply_chat_template(TURNS[:3])
    assert documents(store, byte_tokenizer, "chosen") == ["Bye<|im_end|>"]
    assert documents(store, byte_tokenizer, "rejected") == ["Boo<|im_end|>"]


def test_prompts_keep_their_columns(run: Run, byte_tokenizer: Any) -> None:
    store, _ = run([{"messages": TURNS[:1], "answer": "ä", "n": 2}], format="prompts")
    assert store.read("prompt", 0).tolist() == byte_tokenizer.apply_chat_template(TURNS[:1])
    assert json.loads(bytes(store.read("columns", 0).astype(np.uint8))) == {"answer": "ä", "n": 2}


GOOD = b'{"text": "ok"}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD + b"\r\n" + b'{"text": }\n' + GOOD, "in.jsonl:3: not valid JSON: Expecting value at character 10"),
        (
            GOOD * 2 + b'{"text": "cut',
            "in.jsonl:3: not valid JSON: Unterminated string starting at at character 10 (the ",
        ),
        (GOOD + b"[1, 2]\n", "in.jsonl:2: must be a JSON object, got [1, 2]"),
        (GOOD + b'{"txt": "a"}\n', "in.jsonl:2: field 'text' is missing"),
        (GOOD + b'{"text": 3}\n', "in.jsonl:2: field 'text' must be text, got 3"),
        (GOOD + b'{"text": "\xff"}\n', "in.jsonl:2: not UTF-8 text (byte 10 of the line)"),
        (GOOD + b'{"text": "\\ud800"}\n', "in.jsonl:2: holds half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_a_bad_line_is_named_or_counted(run: Run, byte_tokenizer: Any, content: bytes, said: str, chunk: int) -> None:
    """Rule 11: file, line and reason; or skipped and counted, the good lines kept."""
    with pytest.raises(DataError) as caught:
        run(content, chunk_bytes=chunk)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    store, summary = run(content, chunk_bytes=chunk, on_bad_row="skip")
    assert documents(store, byte_tokenizer) == ["ok<|im_end|>"] * content.count(GOOD)
    assert (summary.bad, len(summary.bad_rows)) == (1, 1)
    assert said in summary.bad_rows[0]


def test_skipping_has_a_cap(run: Run) -> None:
    content = GOOD + b"bad\n" * 3
    assert run(content, on_bad_row="skip", max_bad_rows=3)[1].bad == 3
    for chunk in (16, 1 << 20):
        with pytest.raises(DataError, match=r"in.jsonl:2: not valid JSON: .*more than max_bad_rows 2"):
            run(content, on_bad_row="skip", max_bad_rows=2, chunk_bytes=chunk)


def test_a_row_without_a_supervised_token_is_an_error(run: Run) -> None:
    """Rule 3: naming file and line."""
    with pytest.raises(DataError, match="in.jsonl:2: no token is supervised"):
        run([CHAT, {"messages": TURNS[:1]}], format="messages")


@given(
    st.lists(st.text("ab{}é \t", max_size=12), max_size=8),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 40),
)
@settings(max_examples=150, deadline=None)
def test_lines_do_not_depend_on_how_a_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, bom: bool, last_end: bool, chunk: int
) -> None:
    """Rule 11: BOM, CRLF, blank lines and a last line without an end; every line is in one piece, with its number."""
    data = (b"\xef\xbb\xbf" if bom else b"") + end.join(lines).encode() + (end.encode() if last_end else b"")
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(data)
    pieces = files.cut(path, "auto", chunk)
    found = [(files.place(p, r.at), r.value) for p in pieces for r in files.read(p, "line")]
    assert found == [(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]


@given(
    st.lists(st.recursive(st.integers() | st.text('ab"[]{},\\é'), st.lists, max_leaves=5), max_size=6), st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_arrays_are_read_one_element_at_a_time(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], spaced: bool
) -> None:
    """Rule 11: equal to json.load for any size of the buffer."""
    path = tmp_path_factory.getbasetemp() / "array.json"
    path.write_text(json.dumps(values, indent=2 if spaced else None, ensure_ascii=False), encoding="utf-8")
    for size in (1, 3, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "_READ", size)
            (piece,) = files.cut(path, "json", 16)
            assert [record.value for record in files.read(piece, "line")] == values


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'["1", "2"', "cut off after record 2"),
        (b'["1" "2"]', "a comma is missing after record 1"),
        (b'[{"a": ]', "record 1: not valid JSON"),
        (b"\xff\xfe[", "UTF-16 text"),
    ],
)
def test_a_broken_array_is_an_error(run: Run, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        run(content, name="in.json", file_type="json")


def test_text_files_globs_and_domains(tmp_path: Path, byte_tokenizer: Any) -> None:
    """Globs in order of names; one store a domain; a large text file becomes documents cut between lines."""
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(9)))
    inputs = [
        {"paths": [str(tmp_path / "*.txt")], "domain": "books"},
        {"paths": [str(tmp_path / "a.txt")], "domain": "other"},
    ]
    config = configure(tmp_path, inputs=inputs, chunk_bytes=32)
    summaries = preprocess(config, tmp_path / "out", byte_tokenizer)
    books = documents(TokenStore(tmp_path / "out" / "books"), byte_tokenizer)
    pieces = [text.removesuffix("<|im_end|>") for text in books]
    assert pieces[-1] == "one\ntwo"
    assert "\n".join(pieces[:-1]).split("\n") == [f"line {i}" for i in range(9)]
    assert {name: summary.kept for name, summary in summaries.items()} == {"books": 3, "other": 2}
    assert len(TokenStore(tmp_path / "out" / "other")) == 2


def snapshot(path: Path) -> dict[str, bytes]:
    header = json.loads((path / "store.json").read_text())
    header["config"].pop("workers")
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".json"} | {
        "header": json.dumps(header).encode()
    }


@pytest.fixture
def many(tmp_path: Path) -> Path:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i} " * (i % 7)}) + "\n" for i in range(300)))
    return path


def test_workers_change_nothing(tmp_path: Path, many: Path, byte_tokenizer: Any) -> None:
    """Rule 11: deterministic in order, whatever the number of processes."""
    for workers in (0, 2):
        config = configure(many, chunk_bytes=700, shard_bytes=4000, workers=workers)
        preprocess(config, tmp_path / f"w{workers}", byte_tokenizer)
    one, two = snapshot(tmp_path / "w0"), snapshot(tmp_path / "w2")
    assert one == two
    assert len([name for name in one if name.endswith(".bin")]) > 2, "several shards"
    store = TokenStore(tmp_path / "w0")
    texts = [f"row {i} " * (i % 7) + "<|im_end|>" for i in range(300) if i % 7]
    assert documents(store, byte_tokenizer) == texts


def test_a_stopped_run_goes_on(
    tmp_path: Path, many: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule 11: finished parts are found again, the result is the same; another configuration begins anew."""
    from astrai_train.data.preprocess import run as module

    config = configure(many, chunk_bytes=700)
    preprocess(config, tmp_path / "straight", byte_tokenizer)
    make_part, made = module.make_part, []

    def stopping(job: Any, encoder: Any, number: int, piece: files.Piece) -> Summary:
        if number == 3 and not made:
            raise KeyboardInterrupt
        made.append(number)
        return make_part(job, encoder, number, piece)

    monkeypatch.setattr(module, "make_part", lambda job, encoder, number, piece: (
        make_part(job, encoder, number, piece) if number < 3 else (_ for _ in ()).throw(KeyboardInterrupt)
    ))  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        preprocess(config, tmp_path / "resumed", byte_tokenizer)
    assert not (tmp_path / "resumed").exists()
    made.append(-1)
    monkeypatch.setattr(module, "make_part", stopping)
    preprocess(config, tmp_path / "resumed", byte_tokenizer)
    assert made == [-1, *range(3, made[-1] + 1)]
    assert snapshot(tmp_path / "resumed") == snapshot(tmp_path / "straight")

    (tmp_path / "resumed.partial").mkdir()
    (tmp_path / "resumed.partial" / "run.json").write_text("another")
    preprocess(config, tmp_path / "resumed", byte_tokenizer, overwrite=True)
    assert "beginning anew" in caplog.text
    assert snapshot(tmp_path / "resumed") == snapshot(tmp_path / "straight")


def test_empty_data_is_an_error(run: Run, tmp_path: Path) -> None:
    """Rule 11."""
    with pytest.raises(DataError, match="the files are empty"):
        run(b"")
    with pytest.raises(DataError, match=r"in.jsonl: no row is left of the input \(it holds none\)"):
        run(b"\n\n")
    with pytest.raises(DataError, match=r"no row is left of the input \(2 empty text\)"):
        run([{"text": ""}] * 2)
    with pytest.raises(DataError, match="nowhere.jsonl: no such file"):
        run([CHAT], inputs=[{"paths": ["nowhere.jsonl"]}])


def test_parquet_is_read_by_row_group(run: Run, tmp_path: Path, byte_tokenizer: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"row {i}"} for i in range(5)] + [{"text": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=2)
    with pytest.raises(DataError, match="x.parquet: record 6: field 'text' is missing"):
        run((tmp_path / "x.parquet").read_bytes(), name="x.parquet")
    store, summary = run((tmp_path / "x.parquet").read_bytes(), name="x.parquet", on_bad_row="skip")
    assert documents(store, byte_tokenizer) == [f"row {i}<|im_end|>" for i in range(5)]
    assert summary.bad == 1
    with pytest.raises(DataError, match="bad.parquet: not a readable Parquet file"):
        run(b"PAR1 nothing", name="bad.parquet")


def test_parquet_without_pyarrow_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"astrai-train\[parquet\]"):
        run(b"PAR1", name="x.parquet")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("inputs: [{paths: [a]}]\ntokenizer: t\nformat: text\nworker: 2\n", ":4: unknown field 'worker' (did you mean"),
        ("inputs: [{paths: [a], domains: x}]\ntokenizer: t\nformat: text\n", ":1: unknown field 'inputs.0.domains'"),
        ("inputs: [{paths: []}]\ntokenizer: t\nformat: text\n", ":1: field 'inputs.0.paths'"),
        ("tokenizer: t\nformat: text\n", "field 'inputs' is required"),
        ("inputs: [{paths: [a]}]\ntokenizer: t\nformat: chat\n", ":3: field 'format'"),
    ],
)  # fmt: skip
def test_the_configuration_refuses_by_line(tmp_path: Path, text: str, said: str) -> None:
    """Unknown keys are refused; errors name the file, the line and the field."""
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        PreprocessConfig.from_file(tmp_path / "c.yaml")
    assert str(caught.value).startswith(str(tmp_path / "c.yaml"))
    assert said in str(caught.value)


def test_the_configuration_reads_json(tmp_path: Path) -> None:
    config = configure(tmp_path / "x.jsonl", fields={"text": "body"})
    (tmp_path / "c.json").write_text(json.dumps(config.to_dict(), indent="\t"))
    assert PreprocessConfig.from_file(tmp_path / "c.json") == config
    (tmp_path / "c.json").write_text('{"inputs": \n}')
    with pytest.raises(ConfigError, match="c.json:2: not valid JSON"):
        PreprocessConfig.from_file(tmp_path / "c.json")
    mixed = configure(tmp_path, inputs=[{"paths": [__file__], "type": "text"}, {"paths": [__file__], "domain": "d"}])
    with pytest.raises(ConfigError, match="some have a domain"):
        preprocess(mixed, tmp_path / "out", None)  # type: ignore[arg-type]  # refused before it is used
