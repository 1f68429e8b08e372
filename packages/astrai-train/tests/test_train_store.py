"""The store of pre-tokenised data: row DS1, training rule 11."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astrai_core.errors import CheckpointError, DataError
from astrai_train.data.store import TokenStore, dtype_for

Write = Callable[..., Path]


def texts(lengths: list[int]) -> list[dict[str, Any]]:
    """Documents whose tokens tell where they come from: document d counts from 50 d."""
    return [{"input_ids": [(50 * d + i) % 250 for i in range(n)]} for d, n in enumerate(lengths)]


def test_every_kind_round_trips(write_rows: Write) -> None:
    """Row DS1: each train type reads back what was written, through a pickle too."""
    rows: dict[str, list[dict[str, Any]]] = {
        "text": [{"input_ids": [1, 2, 0]}, {"input_ids": []}, {"input_ids": [7]}],
        "chat": [{"input_ids": [1, 2, 0], "mask": [0, 1, 1]}],
        "pairs": [{"prompt": [1, 2], "chosen": [3], "rejected": [4, 5, 6]}],
        "prompts": [{"prompt": [1, 2], "columns": list(json.dumps({"answer": "ä"}).encode())}],
    }
    for kind, given_rows in rows.items():
        store = pickle.loads(pickle.dumps(TokenStore(write_rows(kind, kind, given_rows))))
        assert len(store) == len(given_rows)
        read = [{name: store.read(name, i).tolist() for name in store.streams} for i in range(len(store))]
        assert read == given_rows
        assert {name: store.lengths(name).tolist() for name in store.streams} == {
            name: [len(row[name]) for row in given_rows] for name in store.streams
        }
        store.verify()


def test_the_dtype_follows_the_vocabulary() -> None:
    """Rule 11: the smallest type that holds the largest id, at both sides of each limit."""
    assert [dtype_for(n) for n in (1, 256, 257, 65_536, 65_537, 2**32)] == ["|u1", "|u1", "<u2", "<u2", "<u4", "<u4"]
    for bad in (0, 2**32 + 1):
        with pytest.raises(DataError, match=f"vocab_size {bad}"):
            dtype_for(bad)


@pytest.mark.parametrize("ids", [[1, 258], [-1]])
def test_ids_out_of_range_are_not_written(write_rows: Write, ids: list[int], tmp_path: Path) -> None:
    """Rule 11; and a failed write leaves nothing behind."""
    with pytest.raises(DataError, match=r"input_ids holds (258|-1), outside 0 to 257"):
        write_rows("bad", "text", [{"input_ids": ids}])
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_not_overwritten_unasked(write_rows: Write) -> None:
    path = write_rows("once", "text", texts([3]))
    with pytest.raises(CheckpointError, match="not empty"):
        write_rows("once", "text", texts([4]))
    assert TokenStore(path).lengths("input_ids").tolist() == [3]


def _truncate(path: Path) -> None:
    file = path / "input_ids.000000.bin"
    file.write_bytes(file.read_bytes()[:-1])


def _edit(key: str, value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        header = json.loads((path / "store.json").read_text())
        (path / "store.json").write_text(json.dumps(header | {key: value}))

    return change


def _offsets(path: Path) -> None:
    np.array([0, 5, 3, 9], "<i8").tofile(path / "input_ids.000000.offsets")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncate, "input_ids.000000.bin: 17 bytes, the header says 18"),
        (lambda path: (path / "input_ids.000000.bin").unlink(), "input_ids.000000.bin: cannot be read"),
        (lambda path: (path / "store.json").unlink(), "not a token store (store.json is missing)"),
        (lambda path: (path / "store.json").write_text("{"), "store.json: cannot be read"),
        (lambda path: (path / "store.json").write_text('{"a": 1}'), "store.json: not the header of a token store"),
        (_edit("version", 2), "store.json: format version 2, this astrai reads 1"),
        (_edit("shards", [{}]), "store.json: damaged"),
        (_edit("kind", "chat"), "its streams are not those of kind 'chat'"),
        (_edit("kind", "nonesuch"), "its streams are not those of kind 'nonesuch'"),
        (_offsets, "input_ids.000000.offsets: its offsets do not fit"),
    ],
)
def test_a_damaged_store_is_refused_by_file(write_rows: Write, damage: Callable[[Path], None], said: str) -> None:
    """Rule 11: truncated and foreign files are named."""
    path = write_rows("store", "text", texts([2, 3, 4]))
    damage(path)
    with pytest.raises(DataError) as caught:
        TokenStore(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ids_out_of_range_are_not_read(write_rows: Write) -> None:
    """Rule 11: a flipped bit in the file is found when the row is read, and by `verify`."""
    path = write_rows("store", "text", texts([2, 3]))
    items = np.fromfile(path / "input_ids.000000.bin", "<u2")
    items[3] = 300
    items.tofile(path / "input_ids.000000.bin")
    store = TokenStore(path)
    assert store.read("input_ids", 0).tolist() == [0, 1]
    with pytest.raises(DataError, match="input_ids.000000.bin: row 1 holds 300, not below 258"):
        store.read("input_ids", 1)
    with pytest.raises(DataError, match="input_ids.000000.bin: an item"):
        store.verify()
