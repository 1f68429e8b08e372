"""Version of the astrai-train wheel; the only place it is written."""

__version__ = "0.1.0"
