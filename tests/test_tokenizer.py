import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tiny_llm.errors import ChatTemplateError, TokenizerError
from tiny_llm.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
FOLDERS = ("llama_tied", "llama_llama3rope_bias", "qwen2", "gemma")
CASES = [
    pytest.param(name, case, id=f"{name}-{case['kind']}-{case['idx']}")
    for name in FOLDERS
    for case in json.loads((DATA / name / "tokenizer_golden.json").read_text("utf-8"))
]
ENCODE = [param for param in CASES if param.values[1]["kind"] == "encode"]
RANDOM_IDS = [
    param for param in CASES if param.values[1]["kind"] == "decode_random_ids"
]
CHAT = [param for param in CASES if param.values[1]["kind"] == "chat"]


@pytest.fixture(scope="session")
def oracles():
    return {name: Tokenizer.from_folder(DATA / name) for name in FOLDERS}


@pytest.fixture
def folder(tmp_path):
    """A copy of llama_tied's tokenizer files, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "llama_tied" / name, tmp_path)
    return tmp_path


def change_config(folder, name="tokenizer_config.json", **changes):
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, **changes}))


def stream(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.add, ids), detokenizer.finish()]


@pytest.mark.parametrize(("name", "case"), ENCODE)
def test_encoding_equals_the_oracle(oracles, name, case):
    tokenizer = oracles[name]
    assert tokenizer.encode(case["text"]) == case["ids"]
    plain = tokenizer.encode(case["text"], add_special_tokens=False)
    assert plain == case["ids_no_special"]


@pytest.mark.parametrize(("name", "case"), ENCODE + RANDOM_IDS)
def test_decoding_equals_the_oracle(oracles, name, case):
    tokenizer, ids = oracles[name], case["ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == case["decode"]
    assert tokenizer.decode(ids) == case["decode_skip_special"]
    assert "".join(stream(tokenizer, ids)) == case["decode_skip_special"]


@pytest.mark.parametrize(("name", "case"), CHAT)
def test_chat_prompts_equal_the_oracle(oracles, name, case):
    keys = ("tools", "add_generation_prompt", "enable_thinking")
    options = {key: case[key] for key in keys if key in case}
    if "error" in case:
        with pytest.raises(ChatTemplateError, match=case["error"]):
            oracles[name].render_chat(case["messages"], **options)
        return
    prompt = oracles[name].render_chat(case["messages"], **options)
    assert prompt == case["prompt"]
    assert oracles[name].encode_chat(case["messages"], **options) == case["ids"]


def test_chat_template_variables_win_over_the_special_tokens(oracles):
    messages = [{"role": "user", "content": "Hi"}]
    prompt = oracles["gemma"].render_chat(messages, bos_token="<changed>")
    assert prompt.startswith("<changed><start_of_turn>")


def test_chat_template_switches_reach_the_template(oracles):
    messages = [{"role": "user", "content": "Hi"}]
    prompt = oracles["qwen2"].render_chat(messages, enable_thinking=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("name", "bos"),
    [("llama_tied", "<s>"), ("llama_llama3rope_bias", "<|begin_of_text|>")],
)
@pytest.mark.parametrize("times", [0, 1, 3])
def test_text_gets_exactly_one_bos(oracles, name, bos, times):
    ids = oracles[name].encode(bos * times + "Hello world")
    assert ids.count(1) == 1
    assert ids == oracles[name].encode("Hello world")


def test_a_bos_written_in_the_text_stays_when_none_is_added(oracles):
    ids = oracles["llama_tied"].encode("<s><s>", add_special_tokens=False)
    assert ids == [1, 1]


def test_a_literal_bos_is_not_taken_for_the_added_one(oracles):
    ids = oracles["llama_tied"].encode("<s>x", parse_special=False)
    assert ids[0] == 1
    assert 1 not in ids[1:]
    assert oracles["llama_tied"].decode(ids) == "<s>x"


def test_special_tokens_as_text_in_one_thread_do_not_disturb_others(oracles):
    tokenizer = oracles["qwen2"]
    text = "<|im_start|>user"
    parsed, literal = [1, 87, 85, 296], tokenizer.encode(text, parse_special=False)
    assert tokenizer.encode(text) == parsed
    assert tokenizer.decode(literal) == text
    wrong = []

    def encode(parse_special, expected):
        for _ in range(200):
            ids = tokenizer.encode(text, parse_special=parse_special)
            if ids != expected:
                wrong.append(ids)

    threads = [
        threading.Thread(target=encode, args=args)
        for args in ((True, parsed), (False, literal)) * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "found"),
    [(3, "int"), (b"x", "bytes"), (None, "None"), ("\ud800", "ud800")],
)
def test_what_is_not_text_is_refused(oracles, text, found):
    with pytest.raises(TokenizerError, match=found):
        oracles["qwen2"].encode(text)


@pytest.mark.parametrize("bad", [-1, 384, 2**32, 2**70])
def test_an_id_outside_the_vocabulary_is_refused_by_name(oracles, bad):
    with pytest.raises(TokenizerError, match=f"token id {bad} is outside .* 384"):
        oracles["qwen2"].decode([5, bad])
    with pytest.raises(TokenizerError, match=f"token id {bad} is outside .* 384"):
        oracles["qwen2"].detokenizer().add(bad)


@pytest.mark.parametrize("bad", ["5", 5.0, None])
def test_an_id_that_is_no_integer_is_refused(oracles, bad):
    with pytest.raises(TokenizerError, match="must be an integer"):
        oracles["qwen2"].decode([bad])


def test_names_and_sizes_are_those_of_the_files(oracles):
    tied, qwen2 = oracles["llama_tied"], oracles["qwen2"]
    assert (tied.bos_token, tied.bos_token_id, tied.vocab_size) == ("<s>", 1, 384)
    assert (qwen2.bos_token, qwen2.bos_token_id) == (None, None)
    assert tied.has_chat_template


# EOS ids (field case 16)


def test_eos_ids_of_a_published_layout_are_the_union(oracles):
    assert oracles["llama_llama3rope_bias"].eos_token_ids == {2, 3}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, {2}),
        ({"eos_token_id": 5}, None, {2, 5}),
        (None, {"eos_token_id": [5, 6]}, {2, 5, 6}),
        ({"eos_token_id": [7]}, {"eos_token_id": 8}, {2, 7, 8}),
        ({"text_config": {"eos_token_id": 9}}, {"eos_token_id": None}, {2, 9}),
        ({"eos_token_id": -1}, {"eos_token_id": []}, {2}),
    ],
)
def test_eos_ids_are_the_union_of_all_places(folder, config, generation, expected):
    if config is not None:
        change_config(folder, "config.json", **config)
    if generation is not None:
        change_config(folder, "generation_config.json", **generation)
    assert Tokenizer.from_folder(folder).eos_token_ids == expected


@pytest.mark.parametrize("value", ["2", 2.5, True, [2, "3"], {"a": 1}])
def test_an_eos_id_of_the_wrong_type_names_the_file(folder, value):
    change_config(folder, "generation_config.json", eos_token_id=value)
    with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id"):
        Tokenizer.from_folder(folder)


# What the files around the tokenizer say


def test_special_tokens_may_be_objects_or_lie_in_the_map(folder):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>", "lstrip": False}})
    )
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<unk>"})
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.eos_token_ids == {2}


def test_add_bos_token_overrides_what_the_tokenizer_adds(folder):
    change_config(folder, add_bos_token=False)
    assert Tokenizer.from_folder(folder).encode("Hello")[0] != 1
    change_config(folder, add_bos_token=True, add_eos_token=True)
    ids = Tokenizer.from_folder(folder).encode("Hello")
    assert (ids[0], ids[-1]) == (1, 2)


def test_tokenizer_json_decides_where_the_config_does_not_say(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("")[:1] == [1]
    assert tokenizer.eos_token_ids == frozenset()
    assert not tokenizer.has_chat_template


def test_saved_truncation_and_padding_are_not_applied(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    path.write_text(json.dumps(content))
    expected = Tokenizer.from_folder(DATA / "llama_tied").encode("Hello world")
    assert Tokenizer.from_folder(folder).encode("Hello world") == expected


def test_the_newest_place_of_the_chat_template_wins(folder):
    messages = [{"role": "user", "content": "Hi"}]
    change_config(folder, chat_template="config")
    assert Tokenizer.from_folder(folder).render_chat(messages) == "config"
    change_config(folder, "chat_template.json", chat_template="json")
    assert Tokenizer.from_folder(folder).render_chat(messages) == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.from_folder(folder).render_chat(messages) == "jinja"


def test_the_tool_template_is_used_when_tools_are_given(folder):
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    change_config(folder, chat_template=templates)
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=[{"name": "find"}]) == "find"


def test_a_broken_chat_template_fails_when_used_not_when_loaded(folder):
    change_config(folder, chat_template="{% if %}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("Hello world")
    with pytest.raises(ChatTemplateError, match="broken: line 1"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


# Broken folders


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bos_token": 1}, "bos_token must be a string"),
        ({"eos_token": {"text": "x"}}, "eos_token must be a string"),
        ({"eos_token": "<nowhere>"}, "eos_token '<nowhere>' is not in"),
        ({"bos_token": "<nowhere>"}, "bos_token '<nowhere>' is not in"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
        ({"chat_template": 3}, "chat_template is neither"),
        ({"chat_template": [{"name": "x"}]}, "chat_template is neither"),
    ],
)
def test_a_wrong_value_in_the_config_is_named(folder, changes, named):
    change_config(folder, **changes)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json") as error:
        Tokenizer.from_folder(folder)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "config.json",
        "generation_config.json",
        "chat_template.json",
    ],
)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe{}", b"\0" * 64, b"[" * 100_000],
    ids=["empty", "cut", "list", "null", "not-utf8", "zeros", "deep"],
)
def test_a_damaged_file_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_directory_in_the_place_of_a_file_is_named(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        Tokenizer.from_folder(folder)


def test_a_chat_template_that_is_not_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_a_truncated_tokenizer_is_named(folder, share):
    path = folder / "tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a usable"):
        Tokenizer.from_folder(folder)


def test_a_tokenizer_that_makes_the_library_panic_is_named(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a usable"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("old", ["tokenizer.model", "vocab.json"])
def test_an_older_format_says_how_to_convert_it(tmp_path, old):
    (tmp_path / old).write_bytes(b"x")
    with pytest.raises(TokenizerError, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(TokenizerError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


def test_importing_the_tokenizer_does_not_import_jinja_or_mlx():
    code = (
        "import sys, tiny_llm.tokenizer;"
        "print([m for m in ('jinja2', 'mlx.core', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_bos_is_not_doubled_without_tokenizer_config(tmp_path):
    import shutil

    from oracle import DATA

    shutil.copy(DATA / "llama_llama3rope_bias" / "tokenizer.json", tmp_path)
    bare = Tokenizer.from_folder(tmp_path)
    assert bare.encode("<|begin_of_text|>hi") == bare.encode("hi")
    assert bare.encode("hi")[0] == 1
