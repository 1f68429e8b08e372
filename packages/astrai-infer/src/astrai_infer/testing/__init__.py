"""A kit to test against the engine on a CPU in milliseconds: byte tokenizer, tiny and scripted models, small pools."""

from astrai_infer.testing.adapters import save_tiny_adapter
from astrai_infer.testing.device import Recorder, device_engine
from astrai_infer.testing.engines import scripted_engine, small_engine
from astrai_infer.testing.models import ScriptedModel, tiny_model
from astrai_infer.testing.tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer

__all__ = [
    "EOS_ID",
    "VOCAB_SIZE",
    "Recorder",
    "ScriptedModel",
    "byte_tokenizer",
    "device_engine",
    "save_tiny_adapter",
    "scripted_engine",
    "small_engine",
    "tiny_model",
]
