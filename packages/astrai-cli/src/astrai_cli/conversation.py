"""The loop of ``astrai chat``: history, commands, streamed answers that Ctrl-C stops."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from astrai_cli.diagnostics import print_failure
from astrai_cli.loading import streaming
from astrai_cli.output import StreamedText, TokenRate, human_count, whole_file
from astrai_core.errors import AstraiError, RequestError

if TYPE_CHECKING:
    from astrai_infer import Completion, InferenceEngine, SamplingParams

HELP = """\
  /reset         forget the conversation
  /system TEXT   set the system prompt; without a text: the model's own
  /save FILE     write the conversation as a line for `generate --input`
  /exit          leave, as Ctrl-D does
Ctrl-C stops an answer."""


class Conversation:
    """One session with one model.

    Parameters
    ----------
    interactive
        Show a prompt and notes, and let Ctrl-C stop an answer; else print the answers alone.
    stats
        Print the token rate after each answer, on stderr.

    Attributes
    ----------
    n_failed : int
        Messages and commands that could not be served.
    """

    def __init__(
        self, engine: InferenceEngine, params: SamplingParams, *, system: str | None, interactive: bool, stats: bool
    ) -> None:
        self.engine = engine
        self.params = params
        self.system = system
        self.interactive = interactive
        self.stats = stats
        self.turns: list[dict[str, Any]] = []
        self.n_failed = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """System prompt, if one was set, and all turns so far."""
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*start, *self.turns]

    def run(self) -> None:
        """Take turns until the input ends or /exit."""
        if self.interactive:
            import readline  # noqa: F401  (gives input() line editing and history)

            n_parameters = sum(parameter.numel() for parameter in self.engine.model.parameters())
            self._note(
                f"{self.engine.name}: {human_count(n_parameters)} parameters, context of {self.engine.max_seq_len} "
                "tokens\n/help lists the commands, Ctrl-D leaves\n"
            )
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            if not line.startswith("/"):
                self.answer(line)
            elif not self.command(line):
                break

    def answer(self, text: str) -> None:
        """Answer one message; a message that cannot be served is taken back."""
        self.turns.append({"role": "user", "content": text})
        out, rate = StreamedText(), TokenRate()
        answer, completion = "", None
        try:
            prompt_ids = self.engine.encode(self.messages)
            if len(prompt_ids) >= self.engine.max_seq_len:
                raise RequestError(
                    f"the conversation has {len(prompt_ids)} tokens, the context {self.engine.max_seq_len}; "
                    "/reset forgets it, a shorter message may still fit"
                )
            with streaming(self.engine, prompt_ids, self.params) as deltas:
                for delta in deltas:
                    rate.add(len(delta.token_ids))
                    out.write(delta)
                    answer += delta
                    completion = delta.completion
        except AstraiError as error:
            out.end()
            self.turns.pop()
            self._complain(str(error))
            return
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            out.end()
            self._note("stopped")
        else:
            out.end()
        if not answer:
            self.turns.pop()
        else:
            self.turns.append({"role": "assistant", "content": answer})
        if self.stats:
            self._note(str(rate))
        if completion is not None and completion.finish_reason == "length":
            self._note(self._why_cut(completion))
        if self.interactive:
            sys.stdout.write("\n")

    def command(self, line: str) -> bool:
        """Run a /command; return False if it was /exit."""
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        match name:
            case "exit" | "quit":
                return False
            case "help":
                self._note(HELP)
            case "reset":
                self.turns.clear()
                self._note("the conversation is forgotten")
            case "system":
                self.system = rest or None
                self._note("the system prompt is set" if rest else "the system prompt is the model's own")
            case "save":
                self._save(rest)
            case _:
                self._complain(f"unknown command /{name}; /help lists them")
        return True

    def _read(self) -> str | None:
        """Return the next line, or None at the end of the input."""
        if not self.interactive:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        while True:
            try:
                return input("> ")
            except EOFError:
                sys.stdout.write("\n")
                return None
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                self._note("Ctrl-D leaves")

    def _save(self, name: str) -> None:
        if not name:
            self._complain("/save needs a file name")
            return
        try:
            with whole_file(Path(name).expanduser()) as file:
                file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except click.ClickException as error:
            self._complain(error.message)
            return
        self._note(f"{len(self.messages)} messages are in {name}")

    def _why_cut(self, completion: Completion) -> str:
        usage = completion.usage
        if usage.prompt_tokens + usage.completion_tokens >= self.engine.max_seq_len:
            return f"cut off: the context of {self.engine.max_seq_len} tokens is full; /reset forgets the conversation"
        return f"cut off after {usage.completion_tokens} tokens (--max-tokens)"

    def _complain(self, message: str) -> None:
        self.n_failed += 1
        print_failure(click.ClickException(message))

    def _note(self, text: str) -> None:
        """Tell the user something that is not the model's; on stderr, so that piped output stays the answers."""
        if self.interactive:
            click.secho(text, dim=True, err=True)
        elif self.stats or text.startswith("cut off"):
            click.echo(text, err=True)
