"""A kit to test against the engine on a CPU in milliseconds: byte tokenizer, tiny and scripted models, small pools."""

from astrai_infer.testing.engines import scripted_engine, small_engine
from astrai_infer.testing.models import ScriptedModel, tiny_model
from astrai_infer.testing.tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer

__all__ = ["EOS_ID", "VOCAB_SIZE", "ScriptedModel", "byte_tokenizer", "scripted_engine", "small_engine", "tiny_model"]
