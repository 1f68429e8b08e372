"""Servers for tests: in this process, without a socket, and on a port of their own. Needs ``astrai-infer[server]``."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import tokenizers
import uvicorn

from astrai_core.tokenizer.chat_template import ChatTemplate
from astrai_core.tokenizer.stream_decoder import BYTE_OF_CHAR
from astrai_core.tokenizer.tokenizer import Tokenizer
from astrai_infer.client import EngineClient
from astrai_infer.config import EngineConfig
from astrai_infer.engine import InferenceEngine
from astrai_infer.server.app import create_app
from astrai_infer.server.config import ServerConfig
from astrai_infer.server.run import DrainingServer
from astrai_infer.server.serving import Serving
from astrai_infer.testing.models import ScriptedModel
from astrai_infer.testing.tokenizer import EOS_ID

ANSWER_MARK = 1
"""The byte with which a chat prompt ends, and after which :class:`Says` begins."""

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
)
TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}",
    "llama3_json": "{% if tools %}<|python_tag|>{{ tools | tojson }}{% endif %}",
    "mistral": "{% if tools %}[TOOL_CALLS]{{ tools | tojson }}{% endif %}",
    "plain": "",
    "think": "{# <think> #}",
    "think_opened": "{# <think> #}",
}
"""Beginnings of chat templates; what a parser is chosen by stands in them."""


def chat_tokenizer(kind: str = "plain") -> Tokenizer:
    """Return a byte tokenizer whose template is one of :data:`TEMPLATES`."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    end = "<think>\n" if kind == "think_opened" else ""
    template = f"{TEMPLATES[kind]}{PLAIN}{{% if add_generation_prompt %}}<assistant>\x01{end}{{% endif %}}"
    return Tokenizer(backend, config={"eos_token": "<eos>"}, chat_template=ChatTemplate({"default": template}))


class Says:
    """A script for :class:`ScriptedModel`: it writes `text`, then the end of text. Half a surrogate pair stands for a byte
    that is no UTF-8 (``surrogateescape``).

    Parameters
    ----------
    mark
        The last byte of the prompt, which stands nowhere else.
    """

    def __init__(self, text: str, mark: int = ANSWER_MARK) -> None:
        self.text = text
        self._mark = mark
        self._start = 0

    def __call__(self, token_id: int, position: int) -> int:
        """Return the token after `token_id`."""
        if token_id == self._mark:
            self._start = position
        data = [*self.text.encode(errors="surrogateescape"), EOS_ID]
        return data[min(max(position - self._start, 0), len(data) - 1)]


class Held(Says):
    """Stops before its `stop`-th token, having set `reached`, until `go` is set."""

    def __init__(self, text: str, stop: int) -> None:
        super().__init__(text)
        self._stop = stop
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, token_id: int, position: int) -> int:
        """Return the token after `token_id`."""
        if position - self._start == self._stop:
            self.reached.set()
            assert self.go.wait(60), "the test has given up"
        return super().__call__(token_id, position)


def saying_engine(says: Says, kind: str = "plain", **config: Any) -> InferenceEngine:
    """Return an engine that answers every conversation with what `says` holds."""
    model: Any = ScriptedModel(says, max_position_embeddings=4096)
    return InferenceEngine(model, chat_tokenizer(kind), EngineConfig(**config), generation_config={"do_sample": False})


@contextlib.asynccontextmanager
async def serving(engine: InferenceEngine, **config: Any) -> AsyncIterator[Serving]:
    """Serve an engine of this process; give the result to :func:`~astrai_infer.server.app.create_app`."""
    client = await EngineClient.start_thread(lambda: engine)
    try:
        settings = ServerConfig(**{"model": "tiny", **config})
        yield Serving(client, engine.tokenizer, settings, engine.generation_config)
    finally:
        await client.close()


class LiveServer:
    """A server that listens on a port of this machine."""

    def __init__(self, url: str, serving: Serving, server: DrainingServer) -> None:
        self.url = url
        self.serving = serving
        self.server = server
        self.stopped = threading.Event()


@contextlib.contextmanager
def live_server(
    make_engine: Callable[[], InferenceEngine], *, in_process: bool = False, **config: Any
) -> Iterator[LiveServer]:
    """Serve an engine on a free port, from a thread with a loop of its own.

    Parameters
    ----------
    make_engine
        Builds the engine; picklable with `in_process`.
    in_process
        Give the engine a process of its own, as ``astrai serve`` does.
    """
    ready = threading.Event()
    found: list[LiveServer] = []
    problem: list[BaseException] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            if in_process:
                client = await EngineClient.start_process(make_engine)
                stack.push_async_callback(client.close)
                settings = ServerConfig(**{"model": "tiny", **config})
                served = Serving(client, chat_tokenizer(), settings, {})
            else:
                served = await stack.enter_async_context(serving(make_engine(), **config))
            options = uvicorn.Config(create_app(served), port=0, log_config=None, lifespan="off", access_log=False)
            server = DrainingServer(options, served)
            task = asyncio.create_task(server.serve())
            while not server.started and not task.done():
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            found.append(LiveServer(f"http://127.0.0.1:{port}", served, server))
            ready.set()
            await task
            found[0].stopped.set()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            problem.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="live-server")
    thread.start()
    ready.wait()
    if problem:
        raise problem[0]
    try:
        yield found[0]
    finally:
        found[0].server.should_exit = True
        thread.join()
