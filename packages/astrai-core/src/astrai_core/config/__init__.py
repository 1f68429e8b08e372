"""Configuration classes: :mod:`~astrai_core.config.base` and :mod:`~astrai_core.config.model`."""
