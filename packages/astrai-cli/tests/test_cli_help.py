"""Help, version and completion of ``astrai``: grouped, lazy, fast, and with a frozen set of flags (rows CL1, CL2)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import rich_click as click

from astrai_cli import __version__
from astrai_cli.main import COMMANDS, app

LOAD = "--device --dtype --backend --max-seq-len".split()
SAMPLING = """--temperature --top-k --top-p --min-p --seed --max-tokens --stop --repetition-penalty --presence-penalty
--frequency-penalty --rep-window""".split()
SPECULATION = "--speculation --draft-model --max-draft-tokens".split()

# Scripts are written against these: a flag may be added, none may go or be renamed.
FLAGS = {
    "quickstart": ["--train-seconds", "--output", "-o", *LOAD],
    "doctor": ["--json"],
    "chat": ["--model", "-m", "--system", "--stats", *SAMPLING, *LOAD, *SPECULATION],
    "generate": [
        *"--model -m --prompt -p --system --raw --input --output --json".split(),
        *SAMPLING,
        *LOAD,
        *SPECULATION,
    ],
    "serve": [
        *"--config -c --model -m --served-model-name --lora --max-loras --max-lora-rank".split(),
        *"--device --dtype --backend --max-seq-len --max-model-len".split(),
        *"--max-num-seqs --max-batch-tokens".split(),
        *SPECULATION,
        *"--gpu-memory-utilization --host --port --api-key --admin-key".split(),
        *"--max-queue --request-timeout --drain-timeout --max-body-bytes --tool-call-parser".split(),
        *"--reasoning-parser --pooling --vllm-metrics --access-log".split(),
    ],
    "bench": [],
    "tokenizer": [],
    "preprocess": ["config", "--output", "-o", "--overwrite", "--workers", "--json"],
    "data": [],
    "report": ["run", "--output", "-o"],
    "train": ["recipe", "--resume", "--device", "--nprocs"],
    "inspect": ["model", "--json"],
    "convert": ["source", "dest", "--dtype", "--overwrite", "--max-shard-size"],
    "completion": ["shell"],
}


def test_the_flags_are_frozen() -> None:
    found = {
        name: [
            opt
            for param in app.load(name).params
            for opt in (param.opts if isinstance(param, click.Option) else [param.name])
        ]
        for name in COMMANDS
    }
    assert found == {name: [*flags, "--debug"] for name, flags in FLAGS.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(run: Any, name: str) -> None:
    """The first line is the one of the table, and every flag stands in a panel with a help text."""
    if name == "train":
        pytest.importorskip("astrai_train", reason="its flags are the fields of a recipe, which astrai-train knows")
    shown = run(name, "--help")
    assert shown.exit_code == 0
    lines = [line.strip(" │") for line in shown.stdout.splitlines()]
    assert COMMANDS[name].help in " ".join(lines)
    for flag in FLAGS[name]:
        assert not flag.startswith("--") or any(re.search(rf"{flag}\b", line) for line in lines), flag
    assert all(param.help for param in app.load(name).params if isinstance(param, click.Option))
    assert run(name, "-h").stdout == shown.stdout


def test_the_flags_of_generate_are_grouped(run: Any) -> None:
    panels = re.findall(r"╭─ (.*?) ─", run("generate", "--help").stdout)
    assert panels == [
        *("Model", "Prompt", "Output", "Sampling", "Length and end", "Penalties", "Where and how it runs"),
        *("Speculation", "Options"),
    ]


def test_the_commands_are_grouped(run: Any) -> None:
    shown = run("--help").stdout
    assert re.findall(r"╭─ (.*?) ─", shown) == [
        "Start here",
        "Use a model",
        "Make a model",
        "Model files",
        "Shell",
        "Options",
    ]
    names = re.findall(r"^│ (\w+) {2,}\w", shown, re.MULTILINE)
    assert names == list(COMMANDS)
    assert run().stdout == shown, "no command shows the help"


def test_version(run: Any) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"astrai {__version__}\n")


def test_an_unknown_command_is_wrong_usage_with_a_suggestion(run: Any) -> None:
    result = run("genrate")
    assert result.exit_code == 2
    assert result.stderr == "error: no such command 'genrate'. Did you mean 'generate'? (see astrai --help)\n"


def loaded_by(*args: str) -> set[str]:
    """Run the command line in a fresh interpreter; return the packages that were imported."""
    code = (
        "import sys, json, atexit\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        "from astrai_cli.main import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("generate", "--help"), ("completion", "zsh")])
def test_help_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    modules = loaded_by(*args)
    assert not modules & {"torch", "pydantic", "numpy", "tokenizers", "jinja2", "astrai_infer", "astrai_core.types"}
    ran = {f"astrai_cli.commands.{args[0]}"} & modules
    assert {name for name in modules if name.startswith("astrai_cli.commands.")} == ran


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_are_fast(flag: str) -> None:
    """Floor: under 0.3 s. Processor time, the best of five, and relative to Python's own start on a slow machine."""

    def seconds(*args: str) -> float:
        pid = os.posix_spawn(sys.executable, [sys.executable, *args], os.environ, file_actions=silence)
        _, status, usage = os.wait4(pid, 0)
        assert status == 0
        return usage.ru_utime + usage.ru_stime

    silence = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    bare = min(seconds("-c", "pass") for _ in range(5))
    assert min(seconds("-m", "astrai_cli", flag) for _ in range(5)) < max(0.3, 20 * bare)


@pytest.mark.parametrize(
    ("shell", "mark"), [("bash", "complete -o nosort"), ("zsh", "#compdef astrai"), ("fish", "complete --no-files")]
)
def test_completion_scripts(run: Any, shell: str, mark: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert mark in result.stdout
    assert "_ASTRAI_COMPLETE" in result.stdout
    assert run("completion", "tcsh").exit_code == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("astrai ge", ["plain,generate"]),
        ("astrai chat --top-", ["plain,--top-k", "plain,--top-p"]),
        ("astrai chat --dtype b", ["plain,bfloat16", "plain,bf16"]),
        ("astrai inspect sm", ["plain,smollm2", "file,sm"]),
        ("astrai completion ", ["plain,bash", "plain,zsh", "plain,fish"]),
    ],
)
def test_the_scripts_get_their_answers(words: str, expected: list[str]) -> None:
    """What the bash script asks for while a line is typed."""
    environment = {
        **os.environ,
        "_ASTRAI_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from astrai_cli.main import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == expected
