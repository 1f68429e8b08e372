"""What one wheel asks of another without importing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from astrai_core.types import Completion, Request


class RolloutEngine(Protocol):
    """Generation inside training: astrai-infer's scheduler satisfies it, astrai-train only knows the protocol."""

    def run_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests and return when the last is done, in the order given (n choices in a row each)."""
        ...
