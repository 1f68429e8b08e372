"""Chat templates: row T2, inference rule 16."""

from __future__ import annotations

import copy
import datetime
import multiprocessing
import operator
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import tokenizers

from astrai_core.errors import ChatTemplateError, RequestError, TokenizerError
from astrai_core.tokenizer import ChatTemplate, Tokenizer

transformers = pytest.importorskip("transformers")

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- else %}
        {{- "<|start|>ipython<|end|>\n\n" + message.content + "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

TOOLS_TEMPLATE = """{% if tools %}
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2, sort_keys=true) }}
{% endfor %}
</tools>
{% endif %}
{% for message in messages %}
{% if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
{% if message.tool_calls %}
{% for call in message.tool_calls %}
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
{% endfor %}
{% continue %}
{% endif %}
{% if message.role == 'stop' %}{% break %}{% endif %}
{{ message.role }}: {{ message.content }}
{% generation %}{{ documents is none }}{% endgeneration %}
{% endfor %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds <b>é</b> & 'more'",
            "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"z": "<é>", "a": 1}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi there"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi\n"}],
    "turns": [
        {"role": "user", "content": "1 < 2 & 3"},
        {"role": "assistant", "content": "yes", "reasoning": "hm"},
        {"role": "user", "content": "why?"},
    ],
    "tools": [
        {"role": "user", "content": "find"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ],
    "two calls": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}],
}
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def assistant_calls(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


class TestParity:
    """Renders equal transformers' apply_chat_template, refusals included."""

    @pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
    @pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no prompt"])
    @pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
    @pytest.mark.parametrize(
        "source", [CHATML, LLAMA3, MISTRAL, TOOLS_TEMPLATE], ids=["chatml", "llama3", "mistral", "tools"]
    )
    def test_render(
        self,
        byte_level_backend: tokenizers.Tokenizer,
        source: str,
        tools: list[dict[str, Any]] | None,
        prompt: bool,
        conversation: list[dict[str, Any]],
    ) -> None:
        """Rule 16: text and token ids, where transformers renders; an error with its message where it does not."""
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_level_backend, chat_template=source, **SPECIAL
        )
        ours = Tokenizer(byte_level_backend, config=SPECIAL, chat_template=ChatTemplate(source))
        options = {"tools": tools, "add_generation_prompt": prompt}
        before = copy.deepcopy(conversation)
        try:
            expected = theirs.apply_chat_template(conversation, tokenize=False, **options)
        except jinja2.TemplateError as error:
            with pytest.raises(ChatTemplateError, match=re.escape(str(error))):
                ours.apply_chat_template(conversation, **options)
            return
        assert ours.apply_chat_template(conversation, tokenize=False, **options) == expected
        assert ours.apply_chat_template(conversation, **options) == theirs.apply_chat_template(
            conversation, return_dict=False, **options
        )
        assert conversation == before, "the caller's messages were changed"

    @pytest.mark.parametrize("final", ["The answer", "The answer ", "  x\n", "a\n\n"])
    @pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL], ids=["chatml", "llama3", "mistral"])
    def test_continue_final_message(self, byte_level_backend: tokenizers.Tokenizer, source: str, final: str) -> None:
        """The last message stays open, with its trailing space where the template keeps it."""
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_level_backend, chat_template=source, **SPECIAL
        )
        messages = [*user("Hi"), {"role": "assistant", "content": final}]
        assert ChatTemplate(source).render(messages, continue_final_message=True, **SPECIAL) == (
            theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        )

    def test_one_bos(self, byte_level_backend: tokenizers.Tokenizer) -> None:
        """Rule 16: templated text is encoded without adding special tokens: one BOS, not two."""
        backend = tokenizers.Tokenizer.from_str(byte_level_backend.to_str())
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        tokenizer = Tokenizer(backend, config=SPECIAL, chat_template=ChatTemplate(LLAMA3))
        assert tokenizer.encode("x")[0] == 0
        assert tokenizer.apply_chat_template(user("x")).count(0) == 1


class TestNormalisation:
    def test_content_forms(self) -> None:
        """Rule 16: null, text parts and absent assistant content become text."""
        template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "user", "content": None}, *user(parts), {"role": "assistant"}, *user([])]
        assert template.render(messages) == "[][a\nb][][]"

    def test_empty_tool_calls_and_nulls_are_dropped(self) -> None:
        """Rule 16: `tool_calls: []` and null fields look like absent ones."""
        template = ChatTemplate("{{ messages[0] | tojson }}")
        message = {"role": "assistant", "content": "a", "tool_calls": [], "name": None, "refusal": None}
        assert template.render([message]) == '{"role": "assistant", "content": "a"}'

    @pytest.mark.parametrize("arguments", ['{"x": [1, "é"]}', {"x": [1, "é"]}])
    def test_arguments_become_objects(self, arguments: Any) -> None:
        """Rule 16: arguments come as JSON text (OpenAI) or objects; templates see objects."""
        template = ChatTemplate("{{ messages[1].tool_calls[0].function.arguments.x[1] }}")
        assert template.render(assistant_calls(arguments)) == "é"

    @pytest.mark.parametrize("arguments", ["", "{}", None])
    def test_no_arguments(self, arguments: Any) -> None:
        """Rule 17: a call without arguments has the object {}."""
        template = ChatTemplate("{{ messages[1].tool_calls[0].function.arguments | tojson }}")
        assert template.render(assistant_calls(arguments)) == "{}"

    @pytest.mark.parametrize(("arguments", "text"), [('{"x":"é"}', '{"x":"é"}'), ({"x": "é"}, '{"x": "é"}')])
    def test_template_that_pastes_arguments(self, arguments: Any, text: str) -> None:
        """A template of DeepSeek's kind asks `content is none` and pastes arguments: it gets null and JSON text."""
        source = (
            "{% for m in messages %}{% if m['content'] is none %}"
            "{{ 'call ' + m['tool_calls'][0]['function']['arguments'] }}{% endif %}{% endfor %}"
        )
        assert ChatTemplate(source).render(assistant_calls(arguments)) == f"call {text}"

    def test_template_that_handles_both_argument_forms(self) -> None:
        """A template that tests `arguments is string` gets objects."""
        source = (
            "{% set f = messages[1].tool_calls[0].function %}"
            "{% if f.arguments is string %}{{ f.arguments }}{% else %}<{{ f.arguments | tojson }}>{% endif %}"
        )
        assert ChatTemplate(source).render(assistant_calls('{"x":1}')) == '<{"x": 1}>'

    def test_sdk_objects(self) -> None:
        """Messages with `model_dump`, as the OpenAI SDK returns them, are accepted."""
        message = SimpleNamespace(model_dump=lambda: {"role": "user", "content": "x", "name": None})
        assert ChatTemplate("{{ messages[0].role }}").render([message]) == "user"

    @pytest.mark.parametrize(
        ("messages", "error"),
        [
            ([], "messages is empty"),
            ("hi", "messages must be a list"),
            ({"role": "user"}, "messages must be a list"),
            (["hi"], r"messages\[0\] must be an object"),
            ([{"content": "x"}], r"messages\[0\]\.role is missing"),
            ([{"role": 3, "content": "x"}], r"messages\[0\]\.role is 3"),
            ([{"role": "user", "content": "a"}, {"role": "", "content": "x"}], r"messages\[1\]\.role is ''"),
            ([{"role": "user"}], r"messages\[0\]\.content is missing"),
            (user(5), r"messages\[0\]\.content must be a string.*not int"),
            (user([{"type": "image_url"}]), r"messages\[0\]\.content\[0\]\.type 'image_url' is not supported"),
            (user(["x"]), r"messages\[0\]\.content\[0\]\.type 'str'"),
            (user([{"type": "text"}]), r"messages\[0\]\.content\[0\]\.text must be a string"),
            (user(b"x"), r"messages\[0\]\.content is a bytes"),
            ([{"role": "assistant", "tool_calls": {"a": 1}}], r"messages\[0\]\.tool_calls must be a list"),
            ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"tool_calls\[0\]\.function\.name is missing"),
            (assistant_calls("{"), r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not valid JSON"),
            (assistant_calls("[1]"), r"arguments must be a JSON object, not list"),
        ],
    )
    def test_malformed_messages(self, messages: Any, error: str) -> None:
        """Rule 16: a malformed message is refused in one line that names the field."""
        with pytest.raises(RequestError, match=error) as caught:
            ChatTemplate(CHATML).render(messages)
        assert "\n" not in str(caught.value)

    def test_malformed_tools_and_depth(self) -> None:
        """Tools must be objects, and data may not nest without end."""
        with pytest.raises(RequestError, match=r"tools\[0\] must be a JSON object"):
            ChatTemplate(CHATML).render(user("x"), tools=["f"])
        with pytest.raises(RequestError, match="tools must be a list"):
            ChatTemplate(CHATML).render(user("x"), tools={"a": 1})
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(RequestError, match="nests too deeply"):
            ChatTemplate(CHATML).render(user(deep))


class TestErrors:
    def test_refusal_carries_the_templates_message(self) -> None:
        """Rule 16: the template's own message reaches the caller, on one line."""
        with pytest.raises(ChatTemplateError, match="refused the messages: no system role; change them"):
            ChatTemplate("{{ raise_exception('no\n system role') }}").render(user("x"))

    @pytest.mark.parametrize(
        ("source", "error"),
        [
            ("{% if x %}", "model does not compile: line 1: "),
            ("\n{{ x | nosuch }}", "line 2: No filter named 'nosuch'"),
            ("{{ messages[7].role.upper() }}", "UndefinedError"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            ("{{ 'a' + 1 }}", "TypeError"),
            ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ],
    )
    def test_broken_templates(self, source: str, error: str) -> None:
        """Rule 16: what breaks inside a template is one line that says where, never another kind of error."""
        with pytest.raises(ChatTemplateError, match=error) as caught:
            ChatTemplate(source, origin="model").render(user("x"))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ raise_exception.__globals__.json }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({'role': 'x'}) }}",
            "{{ self.__init__.__globals__ }}",
            "{{ '{0.__class__.__mro__}'.format(messages) }}",
            "{{ strftime_now.__code__.co_code }}",
            "{{ dict.mro() }}",
        ],
    )
    def test_sandbox(self, source: str) -> None:
        """Rule 16: a template reaches neither Python's internals nor the caller's data."""
        with pytest.raises(ChatTemplateError, match="SecurityError"):
            ChatTemplate(source).render(user("x"))

    def test_objects_do_not_reach_the_template(self) -> None:
        """Rule 16: template variables are rebuilt from JSON types, so no method of theirs can be called."""
        assert ChatTemplate("{{ path is string }}").render(user("x"), path="p") == "True"
        with pytest.raises(RequestError, match="path is a PosixPath"):
            ChatTemplate("{{ path.unlink() }}").render(user("x"), path=Path("/tmp/x"))

    def test_empty_continuation(self) -> None:
        """continue_final_message needs something to continue, and a template that shows it."""
        with pytest.raises(RequestError, match=r"messages\[0\]\.content is empty"):
            ChatTemplate(CHATML).render(user(""), continue_final_message=True)
        with pytest.raises(ChatTemplateError, match="does not show the end"):
            ChatTemplate("{{ messages | length }}").render(user("x"), continue_final_message=True)


class TestNamedTemplatesAndFiles:
    def test_tool_use_is_picked_with_tools(self) -> None:
        """Several templates: `tool_use` when there are tools, else `default`; others by name; or Jinja source."""
        template = ChatTemplate({"default": "D", "tool_use": "T", "rag": "R"})
        assert template.render(user("x")) == "D"
        assert template.render(user("x"), tools=[]) == "D"
        assert template.render(user("x"), tools=TOOLS) == "T"
        assert template.render(user("x"), chat_template="rag") == "R"
        assert template.render(user("x"), chat_template="{{ 1 + 1 }}") == "2"
        with pytest.raises(
            ChatTemplateError, match="no template 'nosuch'; choose one of: 'default', 'tool_use', 'rag'"
        ):
            template.render(user("x"), chat_template="nosuch")
        with pytest.raises(ChatTemplateError, match="no template 'default'"):
            ChatTemplate({"rag": "R"}).render(user("x"))

    def test_where_templates_are_found(self, tmp_path: Path) -> None:
        """chat_template.jinja first, then tokenizer_config.json, there as text or as a list of names and sources."""
        assert ChatTemplate.from_directory(tmp_path, {}) is None
        listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
        assert ChatTemplate.from_directory(tmp_path, {"chat_template": "C"}) == ChatTemplate("C")
        assert ChatTemplate.from_directory(tmp_path, {"chat_template": listed}) == ChatTemplate(
            {"default": "D", "tool_use": "T"}
        )
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template must be Jinja source"):
            ChatTemplate.from_directory(tmp_path, {"chat_template": [1]})
        (tmp_path / "chat_template.jinja").write_text("J")
        assert ChatTemplate.from_directory(tmp_path, {"chat_template": listed}) == ChatTemplate("J")
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(TokenizerError, match="cannot be read as UTF-8"):
            ChatTemplate.from_directory(tmp_path, {})

    def test_strftime_now(self) -> None:
        """Templates that print today's date get it."""
        year = ChatTemplate("{{ strftime_now('%Y') }}").render(user("x"))
        assert year in {str(datetime.datetime.now().year), str(datetime.datetime.now().year - 1)}


class TestPickle:
    def test_spawned_worker(self) -> None:
        """T2: a template that has been compiled still pickles, and renders in a spawned process."""
        template = ChatTemplate({"default": CHATML, "tool_use": TOOLS_TEMPLATE}, origin="here")
        expected = template.render(user("x"), tools=TOOLS)
        assert template._compiled
        render = operator.methodcaller("render", user("x"), tools=TOOLS)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(render, (template,)) == expected

    def test_compiled_form_is_dropped_and_rebuilt(self) -> None:
        """T2: only sources travel; the copy compiles by itself."""
        template = ChatTemplate(CHATML)
        template.render(user("x"))
        copied = pickle.loads(pickle.dumps(template))
        assert copied == template
        assert copied._compiled == {}
        assert copied.render(user("x")) == template.render(user("x"))
