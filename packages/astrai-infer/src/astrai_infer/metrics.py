"""What an engine tells about itself. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Health:
    """A moment of an engine's life."""

    status: Literal["ok", "paused", "stopped"]
    """"stopped": closed, or its loop died; every request is refused."""
    n_running: int
    n_waiting: int
    n_steps: int
    seconds_since_step: float
    """Since the last step ended; large with requests running means that the device hangs."""
    n_preemptions: int
    n_pages_free: int
    n_pages_cached: int
    n_pages_used: int
    """Pages are counted over all groups of layers; the three add up to the pages that there are."""
    weight_version: int
    n_drafts: int = 0
    """Times that a request had guesses in a step; with every one it got a token, and another for each right guess."""
    n_drafted: int = 0
    """Tokens guessed."""
    n_accepted: int = 0
    """Tokens guessed right."""
