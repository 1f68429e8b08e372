"""Runs the server: engine process, sockets, signals, drain."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from astrai_core.checkpoint.source import open_source
from astrai_core.errors import ConfigError
from astrai_infer.client import EngineClient
from astrai_infer.server.app import create_app
from astrai_infer.server.config import ServerConfig
from astrai_infer.server.serving import Serving

if TYPE_CHECKING:
    from astrai_infer.engine import InferenceEngine

logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """Goes on listening while it drains: the first signal refuses new requests with 503 and lets those that run finish,
    the second ends them.
    """

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving
        self._drain_until_s = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Answer SIGTERM and Ctrl-C. The base class would raise the signal again, and so not exit with 0."""
        if self._serving.draining:
            self.should_exit = self.force_exit = True
            return
        self._serving.draining = True
        self._drain_until_s = time.monotonic() + self._serving.config.drain_timeout
        logger.info("%s: finishing %d requests", signal.Signals(sig).name, self._serving.n_active)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; called ten times a second."""
        drained = self._serving.draining and not self._serving.n_active
        if drained or time.monotonic() > self._drain_until_s:
            return True
        return await super().on_tick(counter)


def serve(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until a signal ends it.

    Parameters
    ----------
    on_ready
        Called with the server's URL when it listens.

    Raises
    ------
    AstraiError
        If the model cannot be loaded, or a setting does not fit it.
    """
    loop_factory = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve(config, on_ready))


async def _serve(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    source = open_source(config.model)
    with _bind(config.host, config.port) as listener:  # refused before the model takes its time
        client = await EngineClient.start_process(functools.partial(_make_engine, config))
        try:
            tokenizer = await asyncio.to_thread(source.tokenizer)
            serving = Serving(client, tokenizer, config, source.generation_config())
            settings = uvicorn.Config(
                create_app(serving),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
            server = DrainingServer(settings, serving)
            gc.collect()
            gc.freeze()  # what was loaded stays: a collection that looks at it all takes 50 ms
            announcing = asyncio.create_task(_announce(server, config, on_ready))
            try:
                await server.serve(sockets=[listener])
            finally:
                announcing.cancel()
        finally:
            await client.close()


def _bind(host: str, port: int) -> socket.socket:
    """Reserve the address; nobody can connect before the server listens."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:
        listener.close()
        raise ConfigError(f"host {host}, port {port}: cannot listen there ({error}); choose another") from None
    return listener


def _make_engine(config: ServerConfig) -> InferenceEngine:
    """Build the engine, in its own process."""
    from astrai_infer.engine import InferenceEngine

    return InferenceEngine.from_pretrained(
        config.model, config.device, config.dtype, adapters=config.lora, **config.engine_settings()
    )


async def _announce(server: uvicorn.Server, config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    on_ready(f"http://{host}:{port}")
