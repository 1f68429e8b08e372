"""Chat templates: the Jinja that a model ships to turn messages into its prompt format (row T2, inference rule 16).

A template is code from whoever published the model, so it runs in Jinja's immutable sandbox and sees plain data only.
The dialect is the one of the Hugging Face Hub: ``trim_blocks``, ``lstrip_blocks``, loop controls, ``raise_exception``,
``strftime_now``, a ``tojson`` that escapes no HTML, and the ``{% generation %}`` tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from astrai_core.errors import ChatTemplateError, RequestError, TokenizerError
from astrai_core.tokenizer.chat_messages import normalize_messages, normalize_tools, plain

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIR = "additional_chat_templates"

# What evaluating a template's expressions can raise besides Jinja's own errors.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
# The trailing space shows whether the template trims messages.
_CONTINUE_MARK = "<|astrai-continue-here|> "


class _Refusal(jinja2.TemplateError):
    """``raise_exception(message)`` was called by the template."""


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training masks; here it is text."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


@dataclass(frozen=True)
class _Compiled:
    template: jinja2.Template
    tests_null_content: bool
    pastes_arguments: bool


def _is_member(node: nodes.Node, name: str) -> bool:
    """Whether ``node`` reads ``x.name`` or ``x['name']``."""
    if isinstance(node, nodes.Getattr):
        return node.attr == name
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == name


def _compile(source: str) -> _Compiled:
    """Compile, and find out which of two message forms the template was written for.

    Some templates (DeepSeek's) branch on ``content is none`` and paste ``arguments`` as the JSON text it is on the
    wire; most need text and objects. Templates written for both keep a test or ``tojson`` beside the pasting.
    """
    environment = _environment()
    tree = environment.parse(source)
    null_tests = [
        test for test in tree.find_all(nodes.Test) if test.name == "none" and _is_member(test.node, "content")
    ]
    uses = sum(_is_member(node, "arguments") for node in tree.find_all((nodes.Getattr, nodes.Getitem)))
    pasted = sum(
        _is_member(child, "arguments")
        for parent in tree.find_all((nodes.Add, nodes.Concat, nodes.Output))
        for child in parent.iter_child_nodes()
    )
    template = environment.from_string(source)
    # Every rendering copies the globals: a third of a short one's time from Jinja's own ChainMap, nothing from a dict.
    template.globals = dict(template.globals)
    return _Compiled(template, bool(null_tests), 0 < uses == pasted)


class ChatTemplate:
    """One or several named chat templates of a model; picklable, compiled on first use in each process.

    Parameters
    ----------
    templates
        The Jinja source, or a mapping of names to sources (``default``, ``tool_use``, ...).
    origin
        Where the source came from (a file), for error messages.
    """

    def __init__(self, templates: str | Mapping[str, str], *, origin: str = "chat template") -> None:
        self.templates: dict[str, str] = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.origin = origin
        for name, source in self.templates.items():
            if not isinstance(source, str):
                raise TokenizerError(f"{origin}: chat template {name!r} must be a string of Jinja source")
        self._compiled: dict[str, _Compiled] = {}

    @classmethod
    def from_directory(cls, path: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """Find a model's templates: in ``.jinja`` files, else in ``tokenizer_config.json``; None if it has none.

        Raises
        ------
        TokenizerError
            A file cannot be read, or ``chat_template`` has a form that is not known.
        """
        files = {p.stem: p for p in sorted(path.glob(f"{TEMPLATE_DIR}/*.jinja"))}
        if (path / TEMPLATE_FILE).is_file():
            files["default"] = path / TEMPLATE_FILE
        if files:
            try:
                found = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{path}: chat template files cannot be read as UTF-8 text: {error}") from error
            return cls(found, origin=str(path / TEMPLATE_FILE))
        entry = config.get("chat_template")
        if entry is None:
            return None
        origin = f"{path / 'tokenizer_config.json'}: chat_template"
        if isinstance(entry, list) and all(
            isinstance(item, dict) and {"name", "template"} <= set(item) for item in entry
        ):
            entry = {item["name"]: item["template"] for item in entry}
        if not isinstance(entry, str | dict):
            raise TokenizerError(f"{origin} must be Jinja source or a list of objects with 'name' and 'template'")
        return cls(entry, origin=origin)

    def __getstate__(self) -> dict[str, Any]:
        return {"templates": self.templates, "origin": self.origin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["templates"], origin=state["origin"])  # type: ignore[misc]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChatTemplate) and self.templates == other.templates

    __hash__ = None  # type: ignore[assignment]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the templates."""
        return tuple(self.templates)

    def source(self, name: str | None = None, *, with_tools: bool = False) -> str:
        """The Jinja source that :meth:`render` would use.

        Parameters
        ----------
        name
            A template's name, or Jinja source to use instead of the model's own. By default ``tool_use`` when there
            are tools and it exists, else ``default``.
        with_tools
            Whether tools are given.

        Raises
        ------
        ChatTemplateError
            There is no default and no name was given, or ``name`` is neither a known name nor Jinja.
        """
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self.templates else "default"
        if name in self.templates:
            return self.templates[name]
        if "{" in name:
            return name
        known = ", ".join(map(repr, self.names)) or "none"
        raise ChatTemplateError(f"{self.origin} has no template {name!r}; choose one of: {known}")

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Turn messages into the model's prompt text.

        Parameters
        ----------
        messages
            OpenAI-style messages; see :func:`~astrai_core.tokenizer.chat_messages.normalize_messages`.
        tools
            JSON schemas of the functions that the model may call.
        add_generation_prompt
            End with the header of the assistant's turn.
        continue_final_message
            Leave the last message open, so that the model goes on writing it; no generation prompt then.
        chat_template
            The name of one of several templates, or Jinja source to use instead.
        **variables
            Further variables of the template (``bos_token``, ``enable_thinking``, ``documents``, ...).

        Raises
        ------
        RequestError
            Messages, tools or variables are malformed.
        ChatTemplateError
            The template does not compile, broke, or refused the messages.
        """
        tools = normalize_tools(tools)
        source = self.source(chat_template, with_tools=tools is not None)
        compiled = self._compiled.get(source) or self._compile(source)
        conversation = normalize_messages(
            messages,
            keep_null_content=compiled.tests_null_content,
            json_arguments=compiled.pastes_arguments,
        )
        # Templates ask for "documents is none", which an undefined variable is not.
        context = {"documents": None} | {name: plain(value, name) for name, value in variables.items()}
        if continue_final_message:
            if not conversation[-1]["content"]:
                last = len(conversation) - 1
                raise RequestError(
                    f"messages[{last}].content is empty; continue_final_message needs text to go on with"
                )
            conversation[-1]["content"] += _CONTINUE_MARK
            add_generation_prompt = False
        try:
            text = compiled.template.render(
                **context, messages=conversation, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except _Refusal as error:
            raise ChatTemplateError(
                f"the chat template refused the messages: {_one_line(error)}; change them, or give another template"
            ) from error
        except _RENDER_ERRORS as error:
            raise ChatTemplateError(
                f"{self.origin} failed on the messages: {type(error).__name__}: {_one_line(error)}; "
                "correct the template or give another one"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _compile(self, source: str) -> _Compiled:
        try:
            compiled = _compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"{self.origin} does not compile: line {error.lineno}: {_one_line(error)}; "
                "correct the template or give another one"
            ) from error
        except (RecursionError, SyntaxError, ValueError) as error:
            raise ChatTemplateError(
                f"{self.origin} does not compile: {_one_line(error)}; correct the template or give another one"
            ) from error
        self._compiled[source] = compiled
        return compiled

    def files(self) -> dict[str, str]:
        """Relative file names and contents that :meth:`from_directory` reads back."""
        for name in self.templates:
            if not name.replace("_", "").replace("-", "").isalnum():
                raise TokenizerError(f"chat template name {name!r} cannot be a file name; use letters, digits, - and _")
        return {
            TEMPLATE_FILE if name == "default" else f"{TEMPLATE_DIR}/{name}.jinja": source
            for name, source in self.templates.items()
        }


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK.rstrip())
    if at < 0:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not show the end of the last message; give another template"
        )
    head = text[:at]
    return head if text.startswith(_CONTINUE_MARK, at) else head.rstrip()
