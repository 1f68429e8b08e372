"""Version of the astrai-kernels wheel; the only place it is written."""

__version__ = "0.1.0"
