"""``astrai serve``: flags, YAML, and the process itself."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import rich_click as click

pytest.importorskip("astrai_infer.server.config", reason="astrai-infer is not installed")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that the command would serve."""
    from astrai_infer.server import run

    found: list[Any] = []
    monkeypatch.setattr(run, "serve", lambda config, on_ready: found.append(config))
    return found


def test_a_flag_for_every_field_and_a_field_for_every_flag() -> None:
    """The keys of the YAML file are the flags by construction: both are the fields of ServerConfig."""
    from astrai_cli.commands.serve import serve
    from astrai_infer.server.config import ServerConfig

    flags = {param.name for param in serve.params if isinstance(param, click.Option)} - {"config_path", "debug"}
    assert flags - {None} == {field.name for field in dataclasses.fields(ServerConfig)}


def test_flags_take_the_place_of_the_file(run: Any, served: list[Any], tmp_path: Path) -> None:
    """Keys may be written with dashes or underscores, and by the names of other servers."""
    file = tmp_path / "serve.yaml"
    file.write_text("model: here\nmax-model-len: 512\nmax_num_seqs: 8\nport: 1\napi-key: [a, b]\naccess-log: false\n")
    result = run("serve", "--config", file, "--port", 2, "--gpu-memory-utilization", 0.5, "--no-access-log")
    assert result.exit_code == 0, result.stderr
    (config,) = served
    assert (config.model, config.max_seq_len, config.max_num_seqs, config.port) == ("here", 512, 8, 2)
    assert config.api_key == ("a", "b") and config.access_log is False
    assert config.engine_settings()["memory_fraction"] == 0.5
    assert run("serve", "-m", "x/y", "--max-model-len", 64).exit_code == 0
    assert served[1].max_seq_len == 64 and served[1].names == ("x/y", "y")


@pytest.mark.parametrize(
    ("args", "yaml", "said"),
    [
        ((), None, "field 'model' is required"),
        (("-m", "x", "--port", "70000"), None, "--port: input should be less than or equal to 65535"),
        (("-m", "x", "--tool-call-parser", "magic"), None, "--tool-call-parser: must be auto, none, hermes"),
        (("-m", "x", "--reasoning-parser", "magic"), None, "--reasoning-parser: input should be 'auto'"),
        ((), "model: x\nports: 1\n", "unknown field 'ports'"),
        ((), "- model\n", "must hold `flag: value` lines"),
        ((), "model: [\n", "cannot be read as YAML"),
    ],
)
def test_what_is_wrong_is_named(run: Any, served: list[Any], tmp_path: Path, args: Any, yaml: Any, said: str) -> None:
    file = tmp_path / "serve.yaml"
    if yaml is not None:
        file.write_text(yaml)
        args = ("--config", file)
    result = run("serve", *args)
    assert result.exit_code in (1, 2) and said in result.stderr and served == []
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert (str(file) in result.stderr) == (yaml is not None)


@pytest.mark.slow
def test_the_command_serves_until_sigterm(model_dir: Path) -> None:
    """Row of issue 7: it says where it listens, answers, and exits with 0."""
    command = [
        sys.executable,
        "-m",
        "astrai_cli",
        "serve",
        "-m",
        model_dir,
        "--port",
        "0",
        "--served-model-name",
        "abc",
        "--max-seq-len",
        "256",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = None
        while url is None:
            line = process.stderr.readline()
            assert line, "the server ended before it listened"
            found = re.match(r"Serving abc at (http://\S+) ", line)
            url = found and found[1]
        body = {"model": "abc", "messages": [{"role": "user", "content": "?"}], "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "abcdefghijklmnopqrstuvwxyz"
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 0
        assert "POST /v1/chat/completions 200" in rest and "Traceback" not in rest
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken_is_named_before_the_model_is_loaded(run: Any, model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", "-m", model_dir, "--port", taken.getsockname()[1])
    assert result.exit_code == 1 and "cannot listen there" in result.stderr


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_one_line(run_process: Any, tmp_path: Path) -> None:
    result = run_process("serve", "-m", tmp_path / "nowhere")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "nowhere" in result.stderr.splitlines()[-1] and result.stderr.splitlines()[-1].startswith("error: ")
