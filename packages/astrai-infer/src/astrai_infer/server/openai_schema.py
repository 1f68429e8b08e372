"""Requests of OpenAI's API, and astrai's extensions of them. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from astrai_core.errors import RequestError
from astrai_core.types import StructuredOutput

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list of which one bad item is told: a body holds a million, and telling them all takes a minute."""
TokenIds = Many[Annotated[int, Field(ge=0)]]
Stops = Annotated[list[str], Field(fail_fast=True, max_length=64)]
"""Each new piece of text is searched for all of them, in the thread that steps."""
MAX_BIASES = 10_000
"""A request's biases are checked in the event loop, 1 us each, and are part of every step that it runs in."""
MAX_DEPTH = 64
"""Of JSON within a request; far deeper data overflows the stacks of libraries that walk it."""


def _flat_enough(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise ValueError(f"nests deeper than {MAX_DEPTH} levels; send flatter data")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_flat_enough)]
RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template", "self"}


class Strict(BaseModel):
    """Refuses unknown fields, and numbers in quotes."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + 32:  # so many complaints take their time
            raise ValueError(f"has {len(value)} fields and knows {len(cls.model_fields)}; leave the others out")
        return value


class FunctionCall(Strict):
    name: str
    arguments: str = "{}"


class MessageToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """A message; what SDKs send back of an answer is taken as well."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Many[Any] | None = Field(default=None, max_length=0)

    def plain(self) -> dict[str, Any]:
        """The message as a template sees it."""
        fields = self.model_dump(exclude_none=True, exclude={"annotations"})
        if self.role == "developer":
            fields["role"] = "system"
        for call in fields.get("tool_calls", ()):
            call.pop("index", None)
        return fields


class Function(Strict):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type 'json_schema', and only then")
        return self


class StructuredOutputs(Strict):
    """vLLM's extension: one of these."""

    json_: JsonObject | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None


class StreamOptions(Strict):
    include_usage: bool = False


class Sampling(Strict):
    """What chat and text completions share. Ranges are those of SamplingParams."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | Stops | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Stands in the access log."""
    store: Literal[False] | None = None
    """Nothing is stored."""
    service_tier: Literal["auto", "default"] | None = None
    """There is one tier."""
    top_k: int | None = None
    """Extension: keep the k likeliest tokens."""
    min_p: float | None = None
    """Extension: drop tokens below this share of the likeliest one's probability."""
    repetition_penalty: float | None = None
    """Extension: above 1, repeat less of prompt and completion."""
    rep_window: int | None = None
    """Extension: last prompt tokens that presence and frequency penalties count too."""
    min_tokens: int | None = None
    """Extension: no end before this many tokens."""
    stop_token_ids: TokenIds | None = None
    """Extension: further token ids that end the completion."""
    ignore_eos: bool | None = None
    """Extension: do not stop at end-of-text ids."""
    include_stop_str_in_output: bool | None = None
    """Extension: keep the stop string."""
    skip_special_tokens: bool | None = None
    """Extension: false shows special tokens in the text."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """Extension: log-probabilities of the model itself, or after temperature and filters."""
    structured_outputs: StructuredOutputs | None = None
    """Extension: the text must belong to a language."""
    priority: int = 0
    """Extension: smaller is served first."""
    return_token_ids: bool = False
    """Extension: token ids of prompt and completion in the answer."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise ValueError(f"has {len(value)} tokens and the server takes {MAX_BIASES}; send fewer")
        for key, bias in value.items() if isinstance(value, dict) else ():
            if not isinstance(key, str) or not key.isdecimal():
                raise ValueError(f"{key!r} is no token id; use digits")
            if type(bias) not in (int, float):
                raise ValueError(f"the bias of {key} is no number; correct it")
        return value

    @model_validator(mode="after")
    def _options_of_streams(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with the token counts; all chunks before have a `usage` of null then."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams that were given, but for lengths, log-probabilities and structure."""
        names = """temperature top_p n stop seed presence_penalty frequency_penalty top_k min_p repetition_penalty
        rep_window min_tokens stop_token_ids ignore_eos include_stop_str_in_output skip_special_tokens
        logprobs_mode""".split()
        fields = {name: getattr(self, name) for name in names}
        if self.logit_bias is not None:
            fields["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return fields

    def structure(self) -> StructuredOutput | None:
        """The language that the extension asks for."""
        asked = self.structured_outputs
        if asked is None:
            return None
        return StructuredOutput.from_dict(
            {
                "json_schema": asked.json_,
                "regex": asked.regex,
                "choice": asked.choice,
                "grammar": asked.grammar,
            }
        )


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Many[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    """Extension: variables of the chat template, such as enable_thinking."""
    continue_final_message: bool = False
    """Extension: go on with the last message instead of starting a new one."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := RESERVED & set(value or {}):
            raise ValueError(f"{sorted(taken)[0]} is not a variable of yours; leave it out")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice asks for a call but there are no tools; add tools")
        forced = self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)
        if not forced and any(tool.function.strict for tool in self.tools or ()):
            raise ValueError("strict functions need tool_choice 'required' or a named function")
        return self

    def structure(self) -> StructuredOutput | None:
        """The language that `response_format` or the extension asks for."""
        asked, format = super().structure(), self.response_format
        if format is None or format.type == "text":
            return asked
        if asked is not None:
            raise RequestError("response_format and structured_outputs exclude each other; give one")
        schema = {"type": "object"} if format.json_schema is None else format.json_schema.schema_
        return StructuredOutput(json_schema=schema)


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: str | TokenIds | Many[str] | Many[TokenIds]
    max_tokens: int | None = 16
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    add_special_tokens: bool = True
    """Extension: false encodes the prompt without BOS."""

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if not self.prompt:
            raise ValueError("prompt is empty; give at least one token")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo: true")
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("echo with logprobs cannot be streamed; leave out stream")
        return self


class EmbeddingRequest(Strict):
    """``POST /v1/embeddings``."""

    model: str
    input: str | TokenIds | Many[str] | Many[TokenIds]
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    """Extension: how the last hidden states are pooled; by default what the server was started with."""


class TokenizeRequest(Strict):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = None
    tools: Many[Tool] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds
