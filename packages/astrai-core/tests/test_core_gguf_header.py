"""The header of GGUF files: values, truncation, damage."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astrai_core.checkpoint.gguf import GGUFFile
from astrai_core.errors import AstraiError, CheckpointError, MissingDependencyError

gguf = pytest.importorskip("gguf")


def small_llama(writer: Any) -> None:
    """Keys and some tensors of a small Llama."""
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    rng = np.random.default_rng(0)
    for name, shape in {"token_embd.weight": (421, 64), "blk.0.attn_q.weight": (64, 64)}.items():
        values = rng.standard_normal(shape, np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    divisors = np.array([1, 1, 1, 1, 1, 2.5, 8, 8], np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


class TestHeader:
    def test_every_value_type(self, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
        """Metadata and tensor directory equal those of gguf.GGUFReader."""

        def fill(writer: Any) -> None:
            small_llama(writer)
            for width in (8, 16, 32, 64):
                getattr(writer, f"add_uint{width}")(f"x.uint{width}", 2**width - 1)
                getattr(writer, f"add_int{width}")(f"x.int{width}", -(2 ** (width - 1)))
            writer.add_float64("x.float64", 0.1)
            writer.add_bool("x.bool", True)
            writer.add_array("x.ints", [1, -2, 3])
            writer.add_array("x.floats", [0.5, -1.25])
            writer.add_array("x.bools", [True, False])
            writer.add_array("x.texts", ["", "é", "a" * 300])

        path = write_gguf(tmp_path / "m.gguf", fill)
        file, reader = GGUFFile(path), gguf.GGUFReader(path)
        theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(theirs)
        for key, value in file.metadata.items():
            assert value == (pytest.approx(theirs[key], rel=1e-6) if isinstance(value, float) else theirs[key]), key
        assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
        infos = file._header.tensors
        assert [(i.name, i.offset, i.n_bytes, i.shape[::-1]) for i in infos.values()] == [
            (t.name, t.data_offset, t.n_bytes, tuple(t.shape.tolist())) for t in reader.tensors
        ]

    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_truncated(self, small_file: bytes, tmp_path: Path, data: st.DataObject) -> None:
        """A file cut anywhere is refused when it is opened, in one line with its name."""
        path = tmp_path / "cut.gguf"
        path.write_bytes(small_file[: data.draw(st.integers(0, len(small_file) - 1))])
        with pytest.raises(CheckpointError, match=r"cut\.gguf") as caught:
            GGUFFile(path)
        assert "\n" not in str(caught.value)

    @settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_damaged(self, small_file: bytes, tmp_path: Path, data: st.DataObject) -> None:
        """A damaged header is read or refused, never another kind of error."""
        damaged = bytearray(small_file)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            file = GGUFFile(path)
            file.config()
            file.tokenizer().encode("a fox")
            list(file.tensors())
        except AstraiError as error:
            assert "\n" not in str(error)  # noqa: PT017  most damage raises; the rest changes values only

    @pytest.fixture(scope="class")
    def small_file(
        self,
        byte_level_backend: tokenizers.Tokenizer,
        add_byte_level: Callable[..., None],
        write_gguf: Callable[..., Path],
        tmp_path_factory: pytest.TempPathFactory,
    ) -> bytes:
        def fill(writer: Any) -> None:
            small_llama(writer)
            add_byte_level(writer, byte_level_backend)

        content = write_gguf(path := tmp_path_factory.mktemp("gguf") / "m.gguf", fill).read_bytes()
        GGUFFile(path).config()
        GGUFFile(path).tokenizer()
        return content


class TestRefusals:
    """Bad input: one line that names the file, the key, and the remedy."""

    @pytest.mark.parametrize(
        ("content", "error"),
        [
            (b"", "is not a GGUF file"),
            (b"PK\x03\x04zip", "is not a GGUF file"),
            (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "has GGUF version 1;"),
            (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), r"version 50331648 \(or big-endian\)"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "key 'general.architecture' is missing"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "is truncated: its header goes on"),
        ],
    )
    def test_content(self, tmp_path: Path, content: bytes, error: str) -> None:
        """What is no GGUF file of a known version is refused."""
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{error}"):
            GGUFFile(tmp_path / "m.gguf")

    def test_missing_file_and_directory(self, tmp_path: Path) -> None:
        """A path that cannot be read is named, with the reason."""
        with pytest.raises(CheckpointError, match=r"nosuch\.gguf: cannot be read: No such file"):
            GGUFFile(tmp_path / "nosuch.gguf")
        with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
            GGUFFile(tmp_path)

    def test_missing_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the package gguf the pip line is given."""
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'astrai-core\[gguf\]'"):
            GGUFFile(tmp_path / "m.gguf")

    def test_keys_and_types(self, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
        """An unknown architecture, missing keys and wrong value types are named."""

        def write(arch: str, **values: Any) -> Path:
            def fill(writer: Any) -> None:
                for key, value in values.items():
                    add = {list: writer.add_array, int: writer.add_uint32, str: writer.add_string}[type(value)]
                    add(f"{arch}.{key.replace('__', '.')}", value)

            return write_gguf(tmp_path / "m.gguf", fill, arch)

        with pytest.raises(
            CheckpointError, match="architecture 'bert' is not supported.*supported: llama, qwen2, qwen3"
        ):
            GGUFFile(write("bert"))
        with pytest.raises(CheckpointError, match="key 'llama.embedding_length' is missing; convert the model again"):
            GGUFFile(write("llama")).config()
        with pytest.raises(CheckpointError, match="'llama.embedding_length' must be a whole number, not 'x'"):
            GGUFFile(write("llama", embedding_length="x")).config()
        with pytest.raises(CheckpointError, match="'llama.attention.head_count' differs between layers"):
            GGUFFile(write("llama", embedding_length=64, attention__head_count=[4, 8])).config()
        with pytest.raises(CheckpointError, match=r"tensor 'token_embd\.weight' is missing"):
            GGUFFile(write("llama", embedding_length=64, attention__head_count=[4, 4])).config()
