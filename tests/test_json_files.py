import json

import pytest

from tiny_llm.errors import CorruptFileError
from tiny_llm.json_files import read_json


def test_read_json_gives_the_object(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"a": [1, "ü"], "b": None}), encoding="utf-8")
    assert read_json(path) == {"a": [1, "ü"], "b": None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"{", "is not JSON"),
        (b"\xff{}", "is not UTF-8: byte 0xff at offset 0"),
        (b"[]", "holds a JSON array"),
        (b"null", "holds a JSON null"),
        (b"true", "holds a JSON boolean"),
        (b"1.5", "holds a JSON number"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
    ],
)
def test_read_json_says_what_is_wrong(content, words, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path} ")
    assert words in str(caught.value)


def test_read_json_refuses_absurdly_large_files(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(2**33)  # sparse
    with pytest.raises(CorruptFileError, match="too large"):
        read_json(path)
