"""``astrai serve``: a model behind the OpenAI and Anthropic APIs."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import rich_click as click

from astrai_cli.options import (
    MODEL_PANEL,
    SPECULATION,
    SPECULATION_PANEL,
    WEIGHTS_PANEL,
    ModelName,
    blame,
    debug_option,
    stack,
)

ADDRESS_PANEL, LIMITS_PANEL, ANSWER_PANEL, SHOWN_PANEL = "Address and access", "Limits", "Answers", "What is shown"
NEEDED = ("astrai_infer", "fastapi", "uvicorn", "prometheus_client")

# (flags, type, metavar, panel, help); what is legal is checked by ServerConfig alone.
_FLAGS: tuple[tuple[tuple[str, ...], Any, str, str, str], ...] = (
    (("--model", "-m"), ModelName(), "MODEL", MODEL_PANEL, "A directory, a .gguf file, a Hugging Face id, or smollm2."),
    (
        ("--served-model-name",),
        [str],
        "NAME",
        MODEL_PANEL,
        "Name that clients ask for, may be given several times; by default MODEL and its last part.",
    ),
    (
        ("--lora",),
        [str],
        "NAME=DIR",
        MODEL_PANEL,
        "A PEFT adapter that clients can ask for by that name as a model; may be given several times.",
    ),
    (
        ("--max-loras",),
        int,
        "N",
        MODEL_PANEL,
        "Room for adapters, also those loaded later; by default as many as are given.",
    ),
    (
        ("--max-lora-rank",),
        int,
        "N",
        MODEL_PANEL,
        "Largest rank of one: 8, 16, 32 or 64; by default that of the adapters given.",
    ),
    (("--device",), str, "DEVICE", WEIGHTS_PANEL, "auto, cpu, cuda or cuda:N; by default CUDA if there is any."),
    (("--dtype",), str, "DTYPE", WEIGHTS_PANEL, "Type of the weights; by default float32 on a CPU, else the model's."),
    (("--backend",), str, "NAME", WEIGHTS_PANEL, "Attention backend by name; by default the first that can run."),
    (
        ("--max-seq-len", "--max-model-len"),
        int,
        "N",
        WEIGHTS_PANEL,
        "Longest prompt and completion together, in tokens; by default the model's context.",
    ),
    (("--max-num-seqs",), int, "N", WEIGHTS_PANEL, "Completions that run at once.  [default: 64]"),
    (("--max-batch-tokens",), int, "N", WEIGHTS_PANEL, "Token budget of one step.  [default: 2048]"),
    *((flags, kind, metavar, SPECULATION_PANEL, text) for flags, kind, metavar, text in SPECULATION),
    (
        ("--gpu-memory-utilization",),
        float,
        "SHARE",
        WEIGHTS_PANEL,
        "Of the GPU's free memory, after the weights, what the KV cache may take.  [default: 0.85]",
    ),
    (("--host",), str, "HOST", ADDRESS_PANEL, "Address to listen on.  [default: 127.0.0.1]"),
    (("--port",), int, "PORT", ADDRESS_PANEL, "Port to listen on; 0 takes a free one.  [default: 8000]"),
    (("--api-key",), [str], "KEY", ADDRESS_PANEL, "Clients must send one of these; may be given several times."),
    (
        ("--admin-key",),
        str,
        "KEY",
        ADDRESS_PANEL,
        "Opens /pause, /resume, /sleep, /wake, /update_weights and the adapters' routes.",
    ),
    (("--max-queue",), int, "N", LIMITS_PANEL, "Completions that may wait; one more gets a 429.  [default: 512]"),
    (("--request-timeout",), float, "SECONDS", LIMITS_PANEL, "Ends a request that takes longer.  [default: 600]"),
    (("--drain-timeout",), float, "SECONDS", LIMITS_PANEL, "To finish what runs after SIGTERM.  [default: 60]"),
    (("--max-body-bytes",), int, "N", LIMITS_PANEL, "Largest request body.  [default: 4194304]"),
    (
        ("--tool-call-parser",),
        str,
        "NAME",
        ANSWER_PANEL,
        "hermes, llama3_json, mistral, none, or auto, which reads the chat template.  [default: auto]",
    ),
    (
        ("--reasoning-parser",),
        str,
        "NAME",
        ANSWER_PANEL,
        "Split <think> from the answer: think, none, or auto.  [default: auto]",
    ),
    (("--pooling",), str, "NAME", ANSWER_PANEL, "Of /v1/embeddings: mean or last.  [default: mean]"),
    (
        ("--vllm-metrics/--no-vllm-metrics",),
        bool,
        "",
        SHOWN_PANEL,
        "Show the metrics under the prefix vllm: as well.  [default: no]",
    ),
    (("--access-log/--no-access-log",), bool, "", SHOWN_PANEL, "A line for each request.  [default: yes]"),
)


def _server_options(command: Any) -> Any:
    options = []
    for flags, kind, metavar, panel, text in _FLAGS:
        more: dict[str, Any] = {"panel": panel, "help": text, "default": None, "show_default": False}
        if kind is not bool:
            more |= {"metavar": metavar, "type": kind[0] if isinstance(kind, list) else kind}
        options.append(click.option(*flags, multiple=isinstance(kind, list), **more))
    return stack(options, command)


@click.command()
@click.option(
    "--config",
    "-c",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    panel=MODEL_PANEL,
    help="YAML whose keys are these flags; a flag takes the place of what the file says.",
)
@_server_options
@debug_option
def serve(config_path: Path | None, **flags: Any) -> None:
    """Serve a model over HTTP: the OpenAI and Anthropic APIs.

    The server stops on SIGTERM or Ctrl-C: new requests are refused, those that run are finished; a second signal ends
    them.

    \b
    astrai serve --model smollm2
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}]}'
    """
    from astrai_core.errors import ConfigError, MissingDependencyError

    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise MissingDependencyError(f"this command needs {missing[0]}; run `pip install 'astrai-cli[serve]'`")
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    from astrai_infer.server.config import ServerConfig

    with blame(None, *(() if config_path else (ConfigError,))):
        config = ServerConfig.from_yaml(config_path, given)
    _show_log()
    from astrai_infer.server.run import serve as run

    click.echo(f"Loading {config.model}", err=True)
    run(config, lambda url: click.echo(f"Serving {config.names[0]} at {url} (to chat; its API: {url}/docs)", err=True))


def _show_log() -> None:
    """Print the server's own records to stderr, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    server = logging.getLogger("astrai_infer.server")
    server.addHandler(handler)
    server.setLevel(logging.INFO)
    server.propagate = False
