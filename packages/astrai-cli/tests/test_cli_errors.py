"""Bad input: one line that names the flag, field or file and the remedy; exit code 2 for usage, 1 otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")

Change = Callable[[Path], None]


def only_line(result: Any) -> str:
    """The failure's one line, without ``error: ``."""
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stdout == ""
    return str(result.stderr.removeprefix("error: ").removesuffix("\n"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature", -1], "--temperature: "),
        (["--temperature", "nan"], "--temperature: "),
        (["--temperature", "warm"], "'--temperature': 'warm' is not a valid float"),
        (["--top-p", 1.5], "--top-p: "),
        (["--top-p", 0], "--top-p: "),
        (["--top-k", -2], "--top-k: "),
        (["--min-p", 2], "--min-p: "),
        (["--max-tokens", 0], "--max-tokens: "),
        (["--seed", -1], "--seed: "),
        (["--stop", ""], "--stop: "),
        (["--repetition-penalty", 0], "--repetition-penalty: "),
        (["--presence-penalty", 3], "--presence-penalty: "),
        (["--frequency-penalty", -3], "--frequency-penalty: "),
        (["--rep-window", -1], "--rep-window: "),
    ],
)
def test_sampling_out_of_range_is_found_before_the_model(run: Any, flags: list[Any], said: str) -> None:
    result = run("generate", "-m", "no-such-model", "-p", "Hi", *flags)
    assert result.exit_code == 2
    line = only_line(result)
    assert said in line
    assert line.endswith(" (see astrai generate --help)")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "tpu"], "--device: device 'tpu' is not known"),
        (["--device", "cuda:99"], "--device: device 'cuda:99' is not here"),
        (["--backend", "nonesuch"], "--backend: unknown name 'nonesuch'; choose one of cuda"),
        (["--dtype", "int3"], "'--dtype': 'int3' is not one of 'auto'"),
        (["--max-seq-len", 1], "--max-seq-len: "),
        (["--max-seq-len", 5000], "--max-seq-len: 5000 is more than the model's context of 4096 tokens"),
        (["--max-seq-len", 8], "--prompt: prompt has "),
    ],
)
def test_impossible_places_are_wrong_usage(run: Any, model_dir: Path, flags: list[Any], said: str) -> None:
    result = run("generate", "-m", model_dir, "-p", "Hi", *flags)
    assert result.exit_code == 2
    assert said in only_line(result)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-p", "Hi"], "missing option '--model'"),
        (["-m", "x"], "give either --prompt or --input"),
        (["-m", "x", "-p", ""], "--prompt is empty"),
        (["-m", "x", "-p", "Hi", "--input", __file__, "--output", "y"], "give either --prompt or --input"),
        (["-m", "x", "--input", __file__], "--input and --output go together"),
        (["-m", "x", "-p", "Hi", "--output", "y"], "--input and --output go together"),
        (["-m", "x", "--input", "none.jsonl", "--output", "y"], "'none.jsonl' does not exist"),
        (["-m", "x", "--input", __file__, "--output", "no/such/y"], "--output: the directory of no/such/y"),
        (["-m", "x", "--input", __file__, "--output", "y", "--json"], "--json is for --prompt"),
        (["-m", "x", "-p", "Hi", "--raw", "--system", "s"], "leave out --raw"),
        (
            ["-m", "x", "-p", "Hi", "--tempreature", "1"],
            "no such option '--tempreature'. Did you mean '--temperature'?",
        ),
    ],
)
def test_flags_that_do_not_go_together(run: Any, args: list[str], said: str) -> None:
    result = run("generate", *args)
    assert result.exit_code == 2
    assert said in only_line(result)


def set_config(**keys: Any) -> Change:
    """Change config.json."""

    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


BROKEN: dict[str, tuple[Change, list[str]]] = {
    "no weights": (lambda path: (path / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "truncated weights": (truncate, ["model.safetensors", "truncated", "download it again"]),
    "wrong shapes": (
        set_config(intermediate_size=64),
        ["mlp.down_proj.weight", "shape (260, 32)", "asks for (260, 64)"],
    ),
    "missing tensors": (set_config(num_hidden_layers=2), ["9 of 21 tensors are missing", "layers.1."]),
    "config typo": (set_config(hiden_size=4), ["config.json", "'hiden_size'", "did you mean 'hidden_size'"]),
    "unknown family": (set_config(model_type="lama"), ["config.json", "'lama'", "did you mean 'llama'"]),
    "no config": (lambda path: (path / "config.json").unlink(), ["config.json", "no such file"]),
    "config no JSON": (lambda path: (path / "config.json").write_text("{") and None, ["config.json", "not valid JSON"]),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), ["tokenizer.json is missing"]),
    "tokenizer no JSON": (lambda path: (path / "tokenizer.json").write_text("{") and None, ["tokenizer.json"]),
}


@pytest.mark.parametrize("command", ["generate", "chat", "convert"])
@pytest.mark.parametrize("defect", BROKEN)
def test_broken_models(run: Any, copy_model: Callable[..., Path], tmp_path: Path, defect: str, command: str) -> None:
    change, said = BROKEN[defect]
    path = copy_model()
    change(path)
    args = {"generate": ["-m", path, "-p", "Hi"], "chat": ["-m", path], "convert": [path, tmp_path / "out"]}[command]
    result = run(command, *args, stdin="Hi\n")
    assert result.exit_code == 1
    line = only_line(result)
    assert all(part in line for part in (*said, str(path))), line
    assert not (tmp_path / "out").exists(), "nothing half-written"


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "convert"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nonesuch", "nonesuch: no such model; give a directory, a .gguf file, a Hugging Face id"),
        ("none.gguf", "none.gguf: no such model"),
        ("astrai-tests/nonesuch", "not in the local cache and the hub cannot be reached"),
        (__file__, "is neither a directory nor a .gguf file"),
    ],
)
def test_no_such_model(run: Any, command: str, model: str, said: str) -> None:
    args = {"generate": ["-m", model, "-p", "Hi"], "chat": ["-m", model], "convert": [model, "out"]}
    result = run(command, *args.get(command, [model]))
    assert result.exit_code == 1
    assert said in only_line(result)


def test_a_damaged_gguf_file(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    result = run("inspect", file)
    assert result.exit_code == 1
    assert str(file) in only_line(result)


def test_no_template_names_raw(run: Any, copy_model: Callable[..., Path]) -> None:
    path = copy_model(chat_template=None)
    for args in (["generate", "-p", "Hi"], ["chat"]):
        result = run(args[0], "-m", path, *args[1:])
        assert result.exit_code == 1
        assert "no chat template" in (line := only_line(result))
        assert "--raw" in line
    assert run("generate", "-m", path, "-p", "y", "--raw").stdout == "z\n"


def test_a_template_that_raises_or_does_not_compile(run: Any, copy_model: Callable[..., Path]) -> None:
    raising = copy_model("raising", chat_template="{{ raise_exception('roles must alternate') }}")
    result = run("generate", "-m", raising, "-p", "Hi")
    assert (result.exit_code, "roles must alternate" in only_line(result)) == (1, True)
    broken = copy_model("broken", chat_template="{% if %}")
    result = run("generate", "-m", broken, "-p", "Hi")
    assert (result.exit_code, "chat_template" in (line := only_line(result)), "line 1" in line) == (1, True, True)


def test_a_tokenizer_without_end_of_text_works_and_warns(run: Any, copy_model: Callable[..., Path]) -> None:
    path = copy_model(eos_token=None)
    result = run("generate", "-m", path, "-p", "Hi", "--max-tokens", 40)
    assert result.exit_code == 0
    assert result.stdout.startswith("abcdefghijklmnopqrstuvwxyz")
    assert result.stderr.startswith("warning: ")
    assert "no end-of-text token" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_prompt_with_half_a_surrogate(run: Any, model_dir: Path) -> None:
    """What Python makes of an argument that is not UTF-8."""
    result = run("generate", "-m", model_dir, "-p", "\udcff", "--raw")
    assert result.exit_code == 2
    assert "surrogate" in only_line(result)


def test_without_astrai_infer_the_pip_line_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "astrai_infer" else find_spec(name, *rest)
    )
    for args in (["generate", "-m", "x", "-p", "Hi"], ["chat", "-m", "x"], ["quickstart"]):
        result = run(*args)
        assert result.exit_code == 1
        assert "pip install 'astrai-cli[infer]'" in only_line(result)
