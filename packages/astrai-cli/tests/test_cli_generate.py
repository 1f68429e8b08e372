"""``astrai generate``: contract of the flags, of --json and of the batch (rows CL1, CL2; bad input)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def ask(run: Any, model: Path, *args: object) -> Any:
    """Run ``generate --json``; return the object."""
    result = run("generate", "-m", model, "--json", *args)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1, "one object and nothing else"
    return json.loads(result.stdout)


def test_text_is_the_answer_and_a_line_break(run: Any, model_dir: Path) -> None:
    result = run("generate", "--model", model_dir, "--prompt", "Hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, ALPHABET + "\n", "")


def test_json_has_the_keys_of_the_contract(run: Any, model_dir: Path) -> None:
    answer = ask(run, model_dir, "--prompt", "Hi")
    template = "<s>user\nHi<e>\n<s>assistant\n"
    assert list(answer) == ["text", "token_ids", "finish_reason", "usage", "model"]
    assert answer["text"] == ALPHABET
    assert len(answer["token_ids"]) == 27, "the end-of-text id counts"
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": len(template.replace("<s>", "S").replace("<e>", "E")),
        "completion_tokens": 27,
    }
    assert answer["model"] == str(model_dir)


def test_raw_leaves_the_template_out(run: Any, model_dir: Path) -> None:
    answer = ask(run, model_dir, "--prompt", "wxy", "--raw")
    assert (answer["text"], answer["usage"]["prompt_tokens"]) == ("z", 3)


def test_a_system_prompt_is_part_of_the_prompt(run: Any, model_dir: Path) -> None:
    without, with_system = (
        ask(run, model_dir, "--prompt", "Hi", *extra)["usage"]["prompt_tokens"] for extra in ((), ("--system", "Be."))
    )
    assert with_system - without == len("Ssystem\nBe.E\n")


def test_max_tokens_and_several_stops(run: Any, model_dir: Path) -> None:
    short = ask(run, model_dir, "--prompt", "Hi", "--max-tokens", 3)
    assert (short["text"], short["finish_reason"], len(short["token_ids"])) == ("abc", "length", 3)
    stopped = ask(run, model_dir, "--prompt", "Hi", "--stop", "xy", "--stop", "jk")
    assert (stopped["text"], stopped["finish_reason"]) == ("abcdefghi", "stop")


def test_no_length_means_until_the_context_is_full(run: Any, model_dir: Path) -> None:
    """Row CL2; and --max-seq-len is the context."""
    answer = ask(run, model_dir, "--prompt", "1", "--raw", "--max-seq-len", 40)
    assert (answer["finish_reason"], len(answer["token_ids"])) == ("length", 39)
    assert answer["text"].startswith("234567890123")


def test_the_prompt_can_come_from_stdin(run: Any, model_dir: Path) -> None:
    result = run("generate", "-m", model_dir, "--raw", "-p", "-", "--json", stdin="é x\n")
    assert json.loads(result.stdout)["usage"]["prompt_tokens"] == len("é x".encode()), "one last newline is dropped"
    broken = run("generate", "-m", model_dir, "-p", "-", stdin=b"\xff\n")
    assert (broken.exit_code, broken.stderr) == (1, "error: standard input: not UTF-8 text (byte 0); convert it\n")


def test_a_seed_makes_it_repeatable_and_none_does_not(run: Any, model_dir: Path) -> None:
    hot = ("--prompt", "Hi", "--temperature", 50, "--top-k", 0, "--top-p", 1, "--max-tokens", 16)
    ids = [ask(run, model_dir, *hot, "--seed", seed)["token_ids"] for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]
    assert ask(run, model_dir, *hot)["token_ids"] != ask(run, model_dir, *hot)["token_ids"]


@pytest.mark.parametrize(
    ("generation_config", "flags", "expected"),
    [
        ({}, {}, {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.0, "max_tokens": None}),
        ({"temperature": 0.3, "top_k": 7}, {}, {"temperature": 0.3, "top_k": 7, "top_p": 0.95}),
        ({"temperature": 0.3, "min_p": 0.1}, {"temperature": 0.5}, {"temperature": 0.5, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.3}, {}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.7}, {"temperature": 0.7}),
        ({"top_p": None, "repetition_penalty": 1.2}, {}, {"top_p": 0.95, "repetition_penalty": 1.2}),
    ],
)
def test_flags_win_over_the_model_which_wins_over_the_defaults(
    copy_model: Callable[..., Path], generation_config: Any, flags: Any, expected: Any
) -> None:
    """Row CL2: 0.8, 50, 0.95 where generation_config is silent."""
    from astrai_cli.loading import open_engine, sampling_params
    from astrai_cli.options import LoadOptions

    path = copy_model()
    (path / "generation_config.json").write_text(json.dumps(generation_config))
    with open_engine(str(path), LoadOptions("cpu", None, None, 64), needs_template=True) as engine:
        params = sampling_params(engine, flags)
    assert {name: getattr(params, name) for name in expected} == expected


def test_an_illegal_generation_config_is_named(run: Any, copy_model: Callable[..., Path]) -> None:
    path = copy_model()
    (path / "generation_config.json").write_text('{"temperature": -1}')
    result = run("generate", "-m", path, "-p", "Hi")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {path}: generation_config.json: ")
    assert "'temperature'" in result.stderr


def test_dtype_device_and_backend_reach_the_engine(run: Any, model_dir: Path) -> None:
    flags = ("--dtype", "bf16", "--device", "cpu", "--backend", "torch_native")
    assert ask(run, model_dir, "--prompt", "Hi", *flags)["text"] == ALPHABET


class TestBatch:
    """``--input`` and ``--output``."""

    def batch(self, run: Any, model: Path, folder: Path, lines: list[Any], *flags: object) -> tuple[Any, list[Any]]:
        source, target = folder / "in.jsonl", folder / "out.jsonl"
        source.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        result = run("generate", "-m", model, "--input", source, "--output", target, *flags)
        found = [json.loads(line) for line in target.read_text("utf-8").splitlines()] if target.exists() else []
        assert sorted(path.name for path in folder.iterdir()) == sorted({"in.jsonl", *(["out.jsonl"] if found else [])})
        return result, found

    def test_keys_and_order_are_kept(self, run: Any, model_dir: Path, tmp_path: Path) -> None:
        user = {"role": "user", "content": "Hé"}
        lines = [
            {"id": 1, "prompt": "Hi", "tag": "ä"},
            {"messages": [user], "id": 2, "text": "old", "error": "old"},
            {"prompt": "Hi", "usage": None},
        ]
        result, found = self.batch(run, model_dir, tmp_path, lines)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == ""
        assert "3 lines, 81 tokens" in result.stderr
        assert [list(line) for line in found] == [
            ["id", "prompt", "tag", "text", "token_ids", "finish_reason", "usage"],
            ["messages", "id", "text", "token_ids", "finish_reason", "usage"],
            ["prompt", "usage", "text", "token_ids", "finish_reason"],
        ]
        assert [line["text"] for line in found] == [ALPHABET] * 3
        assert (found[0]["tag"], found[1]["messages"], found[2]["usage"]["completion_tokens"]) == ("ä", [user], 27)

    def test_more_lines_than_run_at_once(self, run: Any, model_dir: Path, tmp_path: Path) -> None:
        lines = [{"prompt": f"{i % 10}", "i": i} for i in range(150)]
        result, found = self.batch(run, model_dir, tmp_path, lines, "--raw", "--max-tokens", 2)
        assert result.exit_code == 0, result.stderr
        assert [(line["i"], line["text"]) for line in found] == [
            (i, f"{(i + 1) % 10}{(i + 2) % 10}") for i in range(150)
        ]

    def test_a_line_that_cannot_be_served_stops_no_other(self, run: Any, model_dir: Path, tmp_path: Path) -> None:
        lines = [{"prompt": "1"}, {"prompt": "1" * 64}, {"prompt": ""}, {"prompt": "5"}]
        result, found = self.batch(run, model_dir, tmp_path, lines, "--raw", "--max-seq-len", 20, "--max-tokens", 2)
        assert result.exit_code == 1
        assert result.stderr == f'error: 2 of 4 lines could not be served; see "error" in {tmp_path / "out.jsonl"}\n'
        assert [line["text"] for line in found] == ["23", "", "", "67"]
        assert [line["finish_reason"] for line in found] == ["length", "error", "error", "length"]
        assert "64 tokens" in found[1]["error"]
        assert "empty" in found[2]["error"]
        assert "error" not in found[0]

    def test_a_message_the_template_refuses(self, run: Any, copy_model: Callable[..., Path], tmp_path: Path) -> None:
        template = "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}{{ '\\n' }}"
        model = copy_model(chat_template=template)
        folder = tmp_path / "batch"
        folder.mkdir()
        result, found = self.batch(run, model, folder, [{"prompt": "no"}, {"prompt": "yes"}])
        assert result.exit_code == 1
        assert "not this" in found[0]["error"]
        assert found[1]["text"] == ALPHABET

    def test_a_system_prompt_is_added_where_none_is(self, run: Any, model_dir: Path, tmp_path: Path) -> None:
        own = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        lines = [{"prompt": "y"}, {"messages": own}, {"messages": own[1:]}]
        _, found = self.batch(run, model_dir, tmp_path, lines, "--system", "Hello", "--max-tokens", 1)
        counts = [line["usage"]["prompt_tokens"] for line in found]
        assert counts[0] == counts[2] == counts[1] + len("Hello") - len("x")

    def test_an_empty_file_gives_an_empty_file(self, run: Any, tmp_path: Path) -> None:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n\n")
        assert run("generate", "-m", "no-such-model", "--input", source, "--output", target).exit_code == 0
        assert target.read_text() == ""

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ('{"prompt": ', "not valid JSON"),
            ("[1]", "must be an object"),
            ('{"text": "x"}', 'must have either "prompt" or "messages"'),
            ('{"prompt": "x", "messages": []}', 'must have either "prompt" or "messages"'),
            ('{"prompt": 3}', '"prompt" must be a string'),
            ('{"messages": ["x"]}', '"messages" must be a list of objects'),
            ('{"messages": [1, 2]}', '"messages" must be a list of objects'),
            ("[" * 100_000, "not valid JSON"),
        ],
    )
    def test_a_bad_line_is_named_before_the_model_loads(
        self, run: Any, tmp_path: Path, line: str, problem: str
    ) -> None:
        source = tmp_path / "in.jsonl"
        source.write_text(f'{{"prompt": "ok"}}\n\n{line}\n')
        result = run("generate", "-m", "no-such-model", "--input", source, "--output", tmp_path / "out.jsonl")
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {source}:3: {problem}")
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "out.jsonl").exists()

    def test_messages_cannot_be_raw(self, run: Any, tmp_path: Path) -> None:
        source = tmp_path / "in.jsonl"
        source.write_text('{"messages": [{"role": "user", "content": "x"}]}')
        result = run("generate", "-m", "x", "--raw", "--input", source, "--output", tmp_path / "out")
        assert (result.exit_code, "leave out --raw" in result.stderr) == (1, True)

    def test_input_that_is_not_utf8(self, run: Any, tmp_path: Path) -> None:
        source = tmp_path / "in.jsonl"
        source.write_bytes(b'{"prompt": "\xff"}')
        result = run("generate", "-m", "x", "--input", source, "--output", tmp_path / "out")
        assert result.stderr == f"error: {source}: not UTF-8 text (byte 12); convert it\n"

    def test_the_output_may_be_the_input(self, run: Any, model_dir: Path, tmp_path: Path) -> None:
        file = tmp_path / "lines.jsonl"
        file.write_text('{"prompt": "3"}\n')
        flags = ("--raw", "--max-tokens", 1)
        assert run("generate", "-m", model_dir, "--input", file, "--output", file, *flags).exit_code == 0
        assert json.loads(file.read_text())["text"] == "4"


def test_guessing_changes_no_answer_and_is_refused_by_name(run: Any, model_dir: Path, copy_model: Any) -> None:
    """Issue 5, deliver 8: the flags, and what is wrong with them."""
    plain = ask(run, model_dir, "--prompt", "Hi", "--temperature", 1, "--seed", 3)
    asked = ("--prompt", "Hi", "--temperature", 1, "--seed", 3)
    for flags in (
        ("--speculation", "ngram"),
        ("--speculation", "draft", "--draft-model", model_dir, "--max-draft-tokens", 3),
    ):
        assert ask(run, model_dir, *asked, *flags) == plain
    other = copy_model("other", chat_template="{{ messages }}")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    for flags, said in (
        (("--speculation", "magic"), "--speculation: input should be 'ngram' or 'draft'"),
        (("--speculation", "draft"), "--draft-model: speculation is 'draft' and draft_model is missing"),
        (("--draft-model", model_dir), "draft_model is given but speculation is None; set speculation to 'draft'"),
        (("--speculation", "ngram", "--max-draft-tokens", 0), "--max-draft-tokens: input should be greater than"),
        (("--speculation", "draft", "--draft-model", other), "its context is 8 tokens, sequences may have"),
    ):
        refused = run("generate", "-m", model_dir, "--prompt", "Hi", *flags)
        assert (refused.exit_code, said in " ".join(refused.stderr.split())) == (2, True), refused.stderr
