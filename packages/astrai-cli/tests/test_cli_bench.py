"""``astrai bench`` on tiny models: the figures, their shape and its usage errors (rows BM1, BM2)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("astrai_infer", reason="astrai-infer is not installed")

TINY = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_json_holds_every_figure_with_its_sizes(run: Any, config: str) -> None:
    shown = run(
        *("bench", "decode", "prefill", "--config", config, "--json", "--no-compare"),
        *("--batch", "1", "--batch", "3", "--prompt-len", "20", "--new-tokens", "4", "--trials", "2"),
    )
    assert shown.exit_code == 0, shown.stderr
    report = json.loads(shown.stdout)
    rows = [(row["what"], row["engine"], row["batch"], row["prompt_len"]) for row in report["results"]]
    assert rows == [(what, "astrai", batch, 20) for what in ("decode", "prefill") for batch in (1, 3)]
    for row in report["results"]:
        tokens = row["batch"] * (4 if row["what"] == "decode" else 20)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["seconds"])
    limits = [row["limit_tokens_per_s"] for row in report["results"]]
    assert limits[2:] == [None, None], "prefill is bound by arithmetic"
    assert 1.5 * limits[0] < limits[1] < 3 * limits[0], "three sequences share the weights, not keys and values"


def test_prompts_beyond_2048_fit(run: Any, config: str) -> None:
    """BM2: the cache is sized from the prompt, whatever its length."""
    shown = run(
        *"bench decode --no-compare --batch 1 --new-tokens 2 --trials 1 --prompt-len 5000 --config".split(), config
    )
    assert shown.exit_code == 0, shown.stderr
    assert "prompt 5000" in shown.stdout
    assert re.search(r"tokens/s +\d+% of what the memory's rate allows$", shown.stdout.strip())


def test_transformers_stands_beside(run: Any, config: str) -> None:
    pytest.importorskip("transformers")
    shown = run(*"bench decode --compare --batch 2 --new-tokens 2 --trials 1 --prompt-len 8 --config".split(), config)
    assert shown.exit_code == 0, shown.stderr
    ours, theirs = shown.stdout.splitlines()
    assert "astrai" in ours
    assert "transformers" in theirs
    assert "astrai is " in theirs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--model", "x", "--config", __file__), "--model and --config exclude each other"),
        (("start",), "start needs --model"),
        (("decode", "--config", __file__), "--config: "),
        (("sideways",), "sideways"),
        (("decode", "--batch", "0"), "--batch"),
    ],
)
def test_wrong_usage(run: Any, arguments: tuple[str, ...], message: str) -> None:
    shown = run("bench", *arguments)
    assert shown.exit_code == 2
    assert message in shown.stderr


def test_decoding_is_measured_with_guesses(run: Any, config: str, tmp_path: Path) -> None:
    """With a draft model the tokens of all steps count; the byte limit of one token a step says nothing then."""
    from astrai_core import AutoModel, ModelConfig, save_pretrained

    save_pretrained(AutoModel.from_config(ModelConfig.from_dict(TINY), "float32", "cpu"), tmp_path / "draft")
    shown = run(
        *("bench", "decode", "--config", config, "--json", "--no-compare", "--batch", "2", "--prompt-len", "20"),
        *("--new-tokens", "8", "--trials", "2", "--speculation", "draft", "--draft-model", tmp_path / "draft"),
    )
    assert shown.exit_code == 0, shown.stderr
    (row,) = json.loads(shown.stdout)["results"]
    assert row["tokens_per_s"] == pytest.approx(2 * 8 / row["seconds"])
    assert row["limit_tokens_per_s"] is None
