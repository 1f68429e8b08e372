"""The errors that astrai raises on purpose.

Every message is one line that names the field or file and the remedy, so that a command can print it as it is::

    AstraiError
    ├── ConfigError             a field of config.json, of a recipe or of a settings object  (also ValueError)
    ├── DataError               training data or a token store that is malformed, empty or damaged  (also ValueError)
    ├── CheckpointError         weights that are missing, truncated, misshapen or half-written
    │   └── ModelNotFoundError  no model under the name or path that was asked for
    ├── TokenizerError          tokenizer files that are missing or unusable
    │   └── ChatTemplateError   a chat template that is missing, broken or refuses the messages
    ├── RequestError            a request that cannot be served as asked  (also ValueError)
    ├── RegistryError           a name that no factory knows, or knows already  (also ValueError)
    ├── BackendError            an attention backend or kernel that was asked for by name and cannot run
    ├── MissingDependencyError  an optional package that is not installed  (also ImportError)
    ├── TrainingError           a training step whose result must not reach the weights
    └── EngineError             the engine could not finish a request through no fault of the caller
"""

from __future__ import annotations


class AstraiError(Exception):
    """Base of all errors raised on purpose; ``str(error)`` is one line fit for a user."""


class ConfigError(AstraiError, ValueError):
    """A configuration field is unknown, missing or out of range."""


class DataError(AstraiError, ValueError):
    """Training data or a pre-tokenised store is malformed, empty, truncated or out of range."""


class CheckpointError(AstraiError):
    """A checkpoint's files are missing, truncated or do not fit the model."""


class ModelNotFoundError(CheckpointError):
    """The model asked for does not exist here and could not be fetched."""


class TokenizerError(AstraiError):
    """Tokenizer files are missing or unusable."""


class ChatTemplateError(TokenizerError):
    """The chat template is missing, does not compile, or raised on the given messages."""


class RequestError(AstraiError, ValueError):
    """A request is malformed or can never be served; other requests are unaffected."""


class RegistryError(AstraiError, ValueError):
    """A factory was given a name it does not know, or one it knows already."""


class BackendError(AstraiError):
    """Something asked for by name (backend, kernel, device) cannot run here."""


class MissingDependencyError(AstraiError, ImportError):
    """An optional dependency is needed; the message gives the pip line."""


class TrainingError(AstraiError):
    """A training step failed (a gradient that is not finite); the weights are those of the step before."""


class EngineError(AstraiError):
    """A step failed or the engine stopped before the request was finished."""
