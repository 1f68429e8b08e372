"""``astrai serve``: flags, YAML, and the process itself."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
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


@pytest.mark.parametrize("yaml", ["lora: [a=one, b=dir=two]\n", "lora: {a: one, b: dir=two}\n", "lora: c=three\n"])
def test_adapters_have_names(run: Any, served: list[Any], tmp_path: Path, yaml: str) -> None:
    """``--lora`` is repeatable; the file has a list, a mapping, or one; room is sized by them unless it says more."""
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: here\nmax-loras: 4\n{yaml}")
    assert run("serve", "--config", file).exit_code == 0
    assert served[0].lora == ({"c": "three"} if "three" in yaml else {"a": "one", "b": "dir=two"})
    assert run("serve", "--config", file, "--lora", "d=x", "--lora", "e=y", "--max-lora-rank", 32).exit_code == 0
    assert served[1].lora == {"d": "x", "e": "y"}
    settings = served[1].engine_settings()
    assert (settings["max_loras"], settings["max_lora_rank"]) == (4, 32)


def test_the_flags_of_guessing_reach_the_engine(run: Any, served: list[Any], tmp_path: Path) -> None:
    """Issue 5, deliver 8: as flags and as keys of the file."""
    file = tmp_path / "serve.yaml"
    file.write_text("model: here\nspeculation: draft\ndraft-model: small\nmax-draft-tokens: 3\n")
    assert run("serve", "--config", file).exit_code == 0
    assert run("serve", "-m", "here", "--speculation", "ngram", "--max-draft-tokens", 7).exit_code == 0
    names = "speculation", "draft_model", "max_draft_tokens"
    settings = [{name: each.engine_settings()[name] for name in names} for each in served]
    assert [tuple(each.values()) for each in settings] == [("draft", "small", 3), ("ngram", None, 7)]


@pytest.mark.parametrize(
    ("args", "yaml", "said"),
    [
        ((), None, "field 'model' is required"),
        (("-m", "x", "--port", "70000"), None, "--port: input should be less than or equal to 65535"),
        (("-m", "x", "--tool-call-parser", "magic"), None, "--tool-call-parser: must be auto, none, hermes"),
        (("-m", "x", "--reasoning-parser", "magic"), None, "--reasoning-parser: input should be 'auto'"),
        ((), "model: x\nports: 1\n", "unknown field 'ports'"),
        (("-m", "x", "--speculation", "magic"), None, "--speculation: input should be 'ngram' or 'draft'"),
        (("-m", "x", "--speculation", "draft"), None, "draft_model is missing; name a small model"),
        (("-m", "x", "--draft-model", "y"), None, "draft_model is given but speculation is None"),
        (("-m", "x", "--lora", "dir"), None, "--lora: 'dir' is not NAME=DIRECTORY; give both"),
        (("-m", "x", "--lora", "=dir"), None, "--lora: '=dir' is not NAME=DIRECTORY; give both"),
        (("-m", "x", "--lora", "a=1", "--lora", "a=2"), None, "--lora: the name 'a' is given twice"),
        (("-m", "x/y", "--lora", "y=1"), None, "lora: 'y' is a name of the model itself; give the adapter another"),
        ((), "model: x\nlora: 3\n", "field 'lora': input should be a valid dictionary"),
        ((), "model: x\nlora: [3]\n", "field 'lora': 3 is not NAME=DIRECTORY; give both"),
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


LONG = {"model": "abc", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def ask(url: str, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """Send a request; returns when the answer begins."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def begin(url: str, length: int) -> http.client.HTTPConnection:
    """Send a request without its body; returns when the server has taken it and waits for the rest (RFC 9110, 10.1.1)."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.putrequest("POST", "/v1/completions")
    for name, value in (("Content-Type", "application/json"), ("Content-Length", length), ("Expect", "100-continue")):
        connection.putheader(name, str(value))
    connection.endheaders()
    expected = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert connection.sock.recv(len(expected), socket.MSG_WAITALL) == expected
    return connection


@pytest.mark.slow
def test_the_command_serves_until_sigterm(model_dir: Path) -> None:
    """Rule 21 and a floor of issue 7: it says where it listens and answers; ``kill -TERM`` under load finishes what runs,
    refuses what is new with 503, and ends with 0.
    """
    command = [sys.executable, "-m", "astrai_cli", "serve", "-m", model_dir, "--port", "0"]
    command += ["--served-model-name", "abc", "--max-seq-len", "256"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = None
        while url is None:
            line = process.stderr.readline()
            assert line, "the server ended before it listened"
            found = re.match(r"Serving abc at (http://\S+) ", line)
            url = found and found[1]
        asked = {"model": "abc", "messages": [{"role": "user", "content": "?"}], "temperature": 0}
        with ask(url, "/v1/chat/completions", asked) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "abcdefghijklmnopqrstuvwxyz"
        late = json.dumps(LONG).encode()
        held = begin(url, len(late))  # so that it still drains when the next one comes
        streams = [ask(url, "/v1/completions", {**LONG, "stream": True, "return_token_ids": True}) for _ in range(16)]
        process.send_signal(signal.SIGTERM)
        while "SIGTERM: finishing" not in (line := process.stderr.readline()):
            assert line, "the server ended at once"
        with ask(url, "/v1/completions", LONG) as refused:
            assert refused.status == 503 and int(refused.headers["Retry-After"]) > 0
            assert "shutting down" in json.load(refused)["error"]["message"]
        held.send(late)
        with held.getresponse() as whole:
            assert whole.status == 200 and json.load(whole)["usage"]["completion_tokens"] == 200
        for stream in streams:
            events = stream.read().split(b"\n\n")[:-1]
            assert stream.status == 200 and events.pop() == b"data: [DONE]"
            choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
            assert sum(len(choice["token_ids"]) for choice in choices) == 200
            assert choices[-1]["finish_reason"] == "length"
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 0
        assert "POST /v1/completions 200" in rest and "POST /v1/completions 503" in rest and "Traceback" not in rest
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
