"""`tiny-llm batch`: answers, their order, bad lines, and going on after a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import ANY

import mlx.core as mx
import oracle
import pytest

import tiny_llm
from tiny_llm import loader
from tiny_llm.cli import batch, options
from tiny_llm.engine import Engine, SamplingParams

TINY = str(Path(__file__).parent / "data" / "llama_llama3rope_bias")
PROGRAM = [sys.executable, "-m", "tiny_llm.cli", "batch"]
CHAT = [{"role": "user", "content": "Hello"}]
SHORT = ("--model", TINY, "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def tiny():
    return tiny_llm.load(TINY)


def lines_of(*lines):
    """The bytes of a file of objects and raw lines."""
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
        for line in lines
    )


def prompts(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(lines_of(*lines))
    return str(path)


def answers(text):
    return [json.loads(line) for line in text.splitlines()]


def lasting(text):
    """What does not depend on time, nor on who was there before."""
    found = answers(text)
    for answer in found:
        answer.pop("seconds", None)
        answer.pop("cached_tokens", None)
    return found


# --- what the answers are


def test_each_line_gets_the_answer_that_generate_gives(run, tiny, tmp_path):
    file = prompts(
        tmp_path, {"prompt": "Hello", "id": "a"}, {"messages": CHAT, "id": 7.5}
    )
    status, out, err = run("batch", file, *SHORT)
    expected = tiny_llm.generate(*tiny, CHAT, max_new_tokens=12)
    first, second = answers(out)
    assert status == 0
    assert (first["line"], first["id"]) == (1, "a")
    assert (second["line"], second["id"]) == (2, 7.5)
    for answer in (first, second):
        assert answer["text"] == expected.text
        assert answer["finish_reason"] == expected.finish_reason
        assert answer["prompt_tokens"] == 21
        assert answer["new_tokens"] == len(expected.token_ids)
        assert answer["seconds"] > 0
        assert "logprobs" not in answer
        assert "error" not in answer
    tokens = 2 * len(expected.token_ids)
    assert err.startswith(f"2 answers, {tokens} tokens in ")
    assert err.endswith("0 of 42 prompt tokens were cached\n")
    assert err.count("\n") == 1


def test_raw_continues_prompts_and_system_begins_chats(run, tiny, tmp_path):
    system = {"role": "system", "content": "Be brief."}
    own = [{"role": "system", "content": "Be long."}, *CHAT]
    file = prompts(tmp_path, {"prompt": "Hello"}, {"messages": CHAT}, {"messages": own})
    _, out, _ = run("batch", file, *SHORT, "--raw")
    texts = [answer["text"] for answer in answers(out)]
    expected = ["Hello", CHAT, own]
    assert texts == [
        tiny_llm.generate(*tiny, prompt, max_new_tokens=12).text for prompt in expected
    ]
    _, out, _ = run("batch", file, *SHORT, "--system", "Be brief.")
    texts = [answer["text"] for answer in answers(out)]
    expected = [[system, *CHAT], [system, *CHAT], own]
    assert texts == [
        tiny_llm.generate(*tiny, prompt, max_new_tokens=12).text for prompt in expected
    ]


OWN = {
    "max_tokens": 5,
    "temperature": 0.0,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.3,
    "seed": 4,
    "stop_token_ids": list(range(100, 250)),
    "ignore_eos": True,
    "logit_bias": {"65": 100.0},
    "logprobs": True,
    "min_tokens": 12,
    "repetition_penalty": 3.0,
    "typical_p": 0.2,
    "bad_words": ["e", "a", "i"],
    "top_n_sigma": 0.1,
}


@pytest.mark.parametrize("name", OWN)
def test_a_setting_of_a_line_wins_over_the_options(run, tiny, tmp_path, name):
    file = prompts(tmp_path, {"prompt": "Hello", name: OWN[name]}, {"prompt": "Hello"})
    sampling = ("--raw", "--temperature", "2", "--seed", "1")
    _, out, _ = run("batch", file, *SHORT, *sampling)
    settings = {"max_tokens": 12, "temperature": 2.0, "seed": 1}
    value = {65: 100.0} if name == "logit_bias" else OWN[name]
    with Engine(*tiny) as engine:
        own, plain = engine.generate(
            ["Hello"] * 2,
            [
                SamplingParams(**{**settings, name: value}),
                SamplingParams(**settings),
            ],
        )
    found = answers(out)
    assert [answer["text"] for answer in found] == [own.text, plain.text]
    assert [a["finish_reason"] for a in found] == [own.finish_reason, "length"]
    if name == "logprobs":
        assert found[0]["logprobs"] == pytest.approx(own.logprobs, abs=1e-6)
        assert "logprobs" not in found[1]
    elif name not in ("ignore_eos", "min_tokens"):
        assert own.token_ids != plain.token_ids


def test_lines_may_ask_for_stops_grammars_and_reports(run, tiny, tmp_path):
    with Engine(*tiny) as engine:
        (plain,) = engine.generate(["Hello"], SamplingParams(max_tokens=12))
    stop = plain.text[2:4]
    file = prompts(
        tmp_path,
        {"prompt": "Hello", "stop": stop},
        {"prompt": "Hello", "choice": ["yes", "no"]},
        {"prompt": "Hello", "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
    )
    _, out, _ = run("batch", file, *SHORT, "--raw")
    first, second, third = answers(out)
    assert first["text"] == plain.text[: plain.text.index(stop)]
    assert first["stop_reason"] == stop
    assert second["text"] in ("yes", "no")
    assert [len(top) for top in third["top_logprobs"]] == [2] * 12
    tops = [top[0][1] for top in third["top_logprobs"]]
    assert third["logprobs"] == tops  # greedy: the likeliest
    assert len(third["prompt_logprobs"]) == third["prompt_tokens"] - 1
    assert third["prompt_logprobs"][0]["logprob"] <= 0


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        (["--max-new-tokens", "3"], {"max_tokens": 3}),
        (["--temperature", "2", "--seed", "3"], {"temperature": 2.0, "seed": 3}),
        (
            ["--temperature", "2", "--seed", "3", "--top-k", "2"],
            {"temperature": 2.0, "seed": 3, "top_k": 2},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_hold_for_lines_that_say_nothing(run, tiny, tmp_path, option, settings):
    file = prompts(tmp_path, {"prompt": "Hello"})
    _, out, _ = run("batch", file, "--model", TINY, "--max-new-tokens", "12", *option)
    with Engine(*tiny) as engine:
        params = SamplingParams(**{"max_tokens": 12, **settings})
        expected = engine.generate([CHAT], params)[0]
    assert answers(out)[0]["text"] == expected.text


def test_sampling_options_are_for_lines_with_a_temperature(run, tmp_path):
    file = prompts(tmp_path, {"prompt": "Hello", "temperature": 1.5})
    texts = [
        answers(run("batch", file, *SHORT, "--seed", seed)[1])[0]["text"]
        for seed in ("1", "2", "1")
    ]
    assert texts[0] == texts[2] != texts[1]


def test_what_prompts_have_in_common_is_computed_once(run, tmp_path):
    system = {"role": "system", "content": "Be brief and kind to everyone here. " * 3}
    lines = [
        {"messages": [system, {"role": "user", "content": str(n)}]} for n in range(4)
    ]
    file = prompts(tmp_path, *lines)
    one_by_one = ("--max-batch", "1")
    _, out, err = run("batch", file, *SHORT, *one_by_one)
    found = answers(out)
    assert found[0]["cached_tokens"] == 0
    assert all(answer["cached_tokens"] >= 64 for answer in found[1:])
    cached = sum(answer["cached_tokens"] for answer in found)
    total = sum(answer["prompt_tokens"] for answer in found)
    assert f"{cached} of {total} prompt tokens were cached" in err
    _, plain, err = run("batch", file, *SHORT, *one_by_one, "--no-prefix-cache")
    assert "; 0 of " in err
    assert lasting(plain) == lasting(out)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([], {"max_batch": 32, "max_step_tokens": 512, "kv_memory": None}),
        (["--max-batch", "900"], {"max_batch": 900, "max_step_tokens": 900}),
        (["--kv-memory", "1MB"], {"kv_memory": 2**20}),
        (["--no-prefix-cache"], {"prefix_cache": False}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_reach_the_engine(run, tmp_path, monkeypatch, arguments, settings):
    given = []

    class Noting(Engine):
        def __init__(self, *arguments, **options):
            given.append(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(batch, "Engine", Noting)
    file = prompts(tmp_path, {"prompt": "Hello", "max_tokens": 1})
    status, _, _ = run("batch", file, "--model", TINY, *arguments)
    assert status == 0
    assert given[0].items() >= settings.items()


def test_kv_bits_pack_the_pages(run, tmp_path, monkeypatch):
    model = oracle.random_model("llama_llama3rope_bias", head_dim=64)
    loaded = loader.Loaded(model, tiny_llm.load_tokenizer(TINY))
    monkeypatch.setattr(options, "load", lambda *_, **__: loaded)
    file = prompts(tmp_path, {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True})
    with Engine(*loaded, kv_bits=4) as engine:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        expected = engine.generate([CHAT], params)[0]
    _, plain, _ = run("batch", file)
    _, packed, _ = run("batch", file, "--kv-bits", "4")
    assert answers(packed)[0]["text"] == expected.text != answers(plain)[0]["text"]


# --- lines that cannot be answered

BAD = {
    "not json": (b"nonsense", "not JSON"),
    "torn": (b'{"prompt": "Hel', "not JSON"),
    "not utf-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "a number": (b"1", "not a JSON object"),
    "a list": (b'["Hello"]', "not a JSON object"),
    "no prompt": ({"id": 1}, "either prompt or messages"),
    "both": ({"prompt": "x", "messages": CHAT}, "either prompt or messages"),
    "unknown key": ({"prompt": "x", "max_new_tokens": 3}, "'max_new_tokens'"),
    "empty": ({"prompt": ""}, "the prompt is empty"),
    "no text": ({"prompt": 3}, "prompt must be a string, got 3"),
    "ids": ({"prompt": [1, 2]}, "prompt must be a string"),
    "surrogate": (b'{"prompt": "\\ud800"}', "not UTF-8"),
    "messages of ids": ({"messages": [1, 2]}, "a message must be an object"),
    "no messages": ({"messages": []}, "at least one message"),
    "no list": ({"messages": "x"}, "at least one message"),
    "no role": ({"messages": [{"content": "x"}]}, "role must be a non-empty string"),
    "surrogate in chat": (
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "cannot encode",
    ),
    "too long": ({"prompt": "x" * 600}, "the model's context is 512 tokens"),
    "max_tokens": ({"prompt": "x", "max_tokens": 0}, "max_tokens must be"),
    "max_tokens text": ({"prompt": "x", "max_tokens": "5"}, "max_tokens must be"),
    "temperature": ({"prompt": "x", "temperature": -1}, "temperature must be"),
    "temperature null": ({"prompt": "x", "temperature": None}, "temperature must be"),
    "nan": (b'{"prompt": "x", "temperature": NaN}', "NaN is no JSON number"),
    "huge": (b'{"prompt": "x", "temperature": 1e999}', "temperature must be"),
    "top_k": ({"prompt": "x", "top_k": 1.5}, "top_k must be"),
    "top_p": ({"prompt": "x", "top_p": 2}, "top_p must be"),
    "min_p": ({"prompt": "x", "min_p": 2}, "min_p must be"),
    "seed": ({"prompt": "x", "seed": -1}, "seed must be"),
    "stops": ({"prompt": "x", "stop_token_ids": "ab"}, "stop_token_ids must be"),
    "a stop": ({"prompt": "x", "stop_token_ids": [999]}, "not in the vocabulary"),
    "ignore_eos": ({"prompt": "x", "ignore_eos": 1}, "ignore_eos must be"),
    "logprobs": ({"prompt": "x", "logprobs": 3}, "logprobs must be"),
    "bias": ({"prompt": "x", "logit_bias": {"a": 1}}, "'a', which is no token id"),
    "bias list": ({"prompt": "x", "logit_bias": [1]}, "logit_bias must map"),
    "bias value": ({"prompt": "x", "logit_bias": {"1": "y"}}, "a finite number"),
    "id": ({"prompt": "x", "id": True}, "id must be a string or a number"),
    "stop": ({"prompt": "x", "stop": [""]}, "stop holds"),
    "n": ({"prompt": "x", "n": 2}, "unknown key 'n'"),
    "two grammars": ({"prompt": "x", "regex": "a", "choice": ["b"]}, "one of these"),
    "a grammar": ({"prompt": "x", "json_schema": {"typ": "object"}}, "typ"),
    "id list": ({"prompt": "x", "id": [1]}, "id must be a string or a number"),
}


def test_bad_lines_are_told_by_number_and_the_others_go_on(run, tmp_path):
    lines = [line for line, _ in BAD.values()]
    good = {"prompt": "Hello", "max_tokens": 3}
    mixed = [line for bad in lines for line in (bad, good)]
    status, out, err = run("batch", prompts(tmp_path, *mixed), *SHORT)
    assert status == 1
    found = answers(out)
    assert [answer["line"] for answer in found] == list(range(1, len(mixed) + 1))
    assert len({answer["text"] for answer in found[1::2]}) == 1
    for name, answer, told, line in zip(
        BAD, found[::2], err.splitlines(), range(1, len(mixed), 2), strict=False
    ):
        assert answer["line"] == line
        assert BAD[name][1] in answer["error"], name
        assert answer.keys() - {"id"} == {"line", "error", "key"}
        assert told == f"tiny-llm: line {line}: {answer['error']}"
    n = len(BAD)
    assert err.splitlines()[n].startswith(f"{n} answers and {n} errors, {3 * n} tokens")
    assert "Traceback" not in err


def test_an_error_keeps_the_id_of_its_line(run, tmp_path):
    file = prompts(tmp_path, {"id": "ü", "prompt": ""}, b'{"id": "\\ud800", "x": 1}')
    found = answers(run("batch", file, *SHORT)[1])
    assert [answer["id"] for answer in found] == ["ü", "\ud800"]


def test_a_request_that_fails_on_its_way_is_the_error_of_its_line(
    run, tmp_path, monkeypatch
):
    submit = Engine.submit

    def broken(logprobs):
        raise RuntimeError("a broken die")

    def handing_out(self, prompt, params):
        if params.max_tokens == 3:
            params = SamplingParams(sampler=broken)
        return submit(self, prompt, params)

    monkeypatch.setattr(Engine, "submit", handing_out)
    good = {"prompt": "Hello"}
    file = prompts(tmp_path, good, {**good, "max_tokens": 3}, good)
    status, out, err = run("batch", file, *SHORT)
    found = answers(out)
    assert status == 1
    assert ["error" in answer for answer in found] == [False, True, False]
    assert found[1]["error"] == "a broken die"
    assert "tiny-llm: line 2: a broken die\n" in err


def test_blank_lines_are_counted_and_passed_over(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    one = json.dumps({"prompt": "Hello"}).encode()
    file.write_bytes(b"\xef\xbb\xbf" + one + b"\r\n\n  \t\n" + one + b"\n\n" + one)
    status, out, _ = run("batch", str(file), *SHORT)
    assert status == 0
    assert [answer["line"] for answer in answers(out)] == [1, 4, 6]
    assert len({answer["text"] for answer in answers(out)}) == 1


def test_no_line_is_no_answer(run, tmp_path):
    assert run("batch", prompts(tmp_path), *SHORT)[:2] == (0, "")


def test_a_model_without_chat_template_continues_prompts_only(
    run, tiny, tmp_path, no_template
):
    file = prompts(tmp_path, {"messages": CHAT}, {"prompt": "Hello"})
    status, out, _ = run(
        "batch", file, "--model", no_template, "--max-new-tokens", "12"
    )
    found = answers(out)
    assert status == 1
    assert "no chat template" in found[0]["error"]
    expected = tiny_llm.generate(*tiny, "Hello", max_new_tokens=12)
    assert found[1]["text"] == expected.text


# --- files


def test_the_answers_file_has_what_standard_output_would_have(run, tmp_path):
    file = prompts(tmp_path, *({"prompt": f"Hellö {n}"} for n in range(7)))
    out = run("batch", file, *SHORT)[1]
    target = tmp_path / "answers.jsonl"
    assert run("batch", file, *SHORT, "-o", str(target))[:2] == (0, "")
    assert lasting(target.read_text("utf-8")) == lasting(out)
    assert len(answers(out)) == 7


def test_a_dash_reads_standard_input(run, tmp_path):
    lines = ({"prompt": "Hello"}, {"prompt": "Bye"})
    status, out, _ = run("batch", "-", *SHORT, stdin=lines_of(*lines))
    assert status == 0
    assert lasting(out) == lasting(run("batch", prompts(tmp_path, *lines), *SHORT)[1])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("prompts.jsonl", "prompts.jsonl is the input"),
        (".", "cannot be written: Is a directory"),
        ("nowhere/answers.jsonl", "cannot be written: No such file"),
        ("other.json", "is not a file of `tiny-llm batch`"),
        ("one-line.json", "is not a file of `tiny-llm batch`"),
        ("list.json", "is not a file of `tiny-llm batch`"),
    ],
)
def test_a_file_that_is_not_of_a_batch_is_left_alone(
    run, tmp_path, monkeypatch, output, message
):
    monkeypatch.chdir(tmp_path)
    prompts(tmp_path, {"prompt": "Hello"})
    (tmp_path / "other.json").write_text('{"mine": 1}\n')
    (tmp_path / "one-line.json").write_text('{"mine": 1}')
    (tmp_path / "list.json").write_text("[]\n")
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    status, out, err = run("batch", "prompts.jsonl", *SHORT, "-o", output)
    assert (status, out) == (1, "")
    assert err.startswith("tiny-llm: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_force_never_empties_the_input(run, tmp_path):
    file = prompts(tmp_path, {"prompt": "Hello"})
    before = Path(file).read_bytes()
    status, _, err = run("batch", file, *SHORT, "-o", file, "--force")
    assert status == 1
    assert "is the input" in err
    assert Path(file).read_bytes() == before


def test_wrong_usage_is_told(run, tmp_path):
    file = prompts(tmp_path, {"prompt": "Hello"})
    for arguments, message in (
        ([file, "--force"], "--force has no effect without -o FILE"),
        ([file, "--raw", "--system", "x"], "no effect with --raw"),
        ([file, "--kv-memory", "much"], "'much' is not a size"),
        ([], "required: FILE"),
    ):
        status, out, err = run("batch", *arguments)
        assert (status, out) == (2, "")
        assert message in err
    missing = str(tmp_path / "nothing.jsonl")
    status, _, err = run("batch", missing, *SHORT)
    assert status == 1
    assert err == f"tiny-llm: error: {missing} cannot be read: No such file or " + (
        "directory\n"
    )
    status, _, err = run("batch", file, "--temperature", "-1", "--model", "nowhere")
    assert status == 1
    assert "temperature must be a number" in err


def test_two_processes_do_not_write_the_same_file(run, tmp_path):
    import fcntl

    file = prompts(tmp_path, {"prompt": "Hello"})
    target = tmp_path / "answers.jsonl"
    with target.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status, _, err = run("batch", file, *SHORT, "-o", str(target))
    assert status == 1
    assert "is being written by another process" in err
    assert run("batch", file, *SHORT, "-o", str(target))[0] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full device")
def test_a_full_disk_is_one_plain_line(run, tmp_path):
    file = prompts(tmp_path, {"prompt": "Hello"})
    status, _, err = run("batch", file, *SHORT, "-o", "/dev/full")
    assert status == 1
    assert err == (
        "tiny-llm: error: /dev/full cannot be written: No space left on device\n"
    )


# --- going on


@pytest.fixture
def seven(tmp_path):
    """Seven prompts (one is bad), and the file of their answers."""
    lines = [{"prompt": f"Hello {n}"} for n in range(7)]
    lines[2] = {"prompt": ""}
    return prompts(tmp_path, *lines), tmp_path / "answers.jsonl"


def submitted(monkeypatch):
    """The prompts that an engine is given."""
    seen = []
    submit = Engine.submit

    def noting(self, prompt, *arguments, **options):
        seen.append(prompt[-1]["content"])
        return submit(self, prompt, *arguments, **options)

    monkeypatch.setattr(Engine, "submit", noting)
    return seen


@pytest.mark.parametrize("kept", range(8))
@pytest.mark.parametrize("torn", [0, 1, 30, -1], ids=lambda n: f"torn {n}")
def test_only_what_is_missing_is_answered(run, monkeypatch, seven, kept, torn):
    file, target = seven
    command = ("batch", file, *SHORT, "-o", str(target))
    run(*command)
    whole = target.read_text("utf-8")
    lines = target.read_bytes().splitlines(keepends=True)
    tail = lines[kept][:torn] if kept < 7 else b'{"line": 8, "te'[:torn]
    target.write_bytes(b"".join(lines[:kept]) + tail)
    seen = submitted(monkeypatch)
    status, _, err = run(*command)
    assert status == 1, "an error among the answers counts whenever it was written"
    assert lasting(target.read_text("utf-8")) == lasting(whole)
    assert target.read_bytes().startswith(b"".join(lines[:kept]))
    assert seen == [f"Hello {n}" for n in range(kept, 7) if n != 2]
    assert (f"({kept} lines are answered already" in err) == (kept > 0)


def test_lines_appended_to_the_input_are_answered(run, seven):
    file, target = seven
    command = ("batch", file, *SHORT, "-o", str(target))
    run(*command)
    before = target.read_bytes()
    with open(file, "ab") as more:
        more.write(lines_of({"prompt": "And this?"}))
    run(*command)
    assert target.read_bytes().startswith(before)
    assert [a["line"] for a in answers(target.read_text("utf-8"))] == list(range(1, 9))


CHANGES = {
    "a line": (["edit"], "answers another line 4: it was changed"),
    "a line less": (["cut"], "answers another line 2: it was changed"),
    "lines gone": (["shorten"], "has more answers than the input has lines"),
    "limit": (["--max-new-tokens", "13"], "with other settings (from line 1 on)"),
    "temperature": (
        ["--temperature", "1", "--seed", "1"],
        "with other settings (from line 1 on)",
    ),
    "seed": (["--seed", "1"], "with other settings (from line 1 on)"),
    "system": (["--system", "Be brief."], "with other settings (from line 1 on)"),
    "raw": (["--raw"], "with other settings (from line 1 on)"),
    "dtype": (["--dtype", "float16"], "with other settings (from line 1 on)"),
    "quantize": (["--quantize", "8bit"], "with other settings (from line 1 on)"),
    "model": (
        ["--model", str(Path(TINY).parent / "llama_tied"), "--raw"],
        "with other settings (from line 1 on)",
    ),
    "place": (["swap"], "answers line 2 where line 1 is next"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_refused_and_force_starts_anew(run, seven, name):
    changes, message = CHANGES[name]
    file, target = seven
    run("batch", file, *SHORT, "-o", str(target))
    lines = Path(file).read_bytes().splitlines(keepends=True)
    arguments = ()
    match changes:
        case ["edit"]:
            lines[3] = lines[3].replace(b"Hello", b"Help")
        case ["cut"]:
            del lines[1]
        case ["shorten"]:
            lines = lines[:5]
        case ["swap"]:
            done = target.read_bytes().splitlines(keepends=True)
            target.write_bytes(b"".join(done[1::-1] + done[2:]))
        case _:
            arguments = tuple(changes)
    Path(file).write_bytes(b"".join(lines))
    before = target.read_bytes()
    command = ("batch", file, *SHORT, *arguments, "-o", str(target))
    status, out, err = run(*command)
    assert (status, out) == (1, "")
    assert message in err
    assert "--force starts anew" in err
    assert target.read_bytes() == before
    assert run(*command, "--force")[0] == 1  # (line 3 is empty)
    found = answers(target.read_text("utf-8"))
    assert [answer["line"] for answer in found] == list(range(1, len(lines) + 1))
    assert lasting(target.read_text("utf-8")) == lasting(
        run("batch", file, *SHORT, *arguments)[1]
    )


def test_what_changes_no_answer_may_change(run, seven, tmp_path):
    file, target = seven
    run("batch", file, *SHORT, "-o", str(target))
    before = target.read_bytes()
    target.write_bytes(b"".join(before.splitlines(keepends=True)[:4]))
    copy = tmp_path / "model"
    copy.symlink_to(TINY)
    options = ("--max-batch", "2", "--no-prefix-cache", "--kv-memory", "1MB")
    settings = ("--model", str(copy), "--max-new-tokens", "12", *options)
    renamed = Path(file).rename(tmp_path / "renamed.jsonl")
    run("batch", str(renamed), *settings, "-o", str(target))
    assert lasting(target.read_text("utf-8")) == lasting(before.decode())


# --- many lines


def test_answers_are_written_when_all_before_them_are_there(run, tmp_path, monkeypatch):
    lines = [{"prompt": f"Hello {n}", "ignore_eos": True} for n in range(30)]
    lines[0]["max_tokens"] = 60  # slow
    target = tmp_path / "answers.jsonl"
    sizes = []  # answers in the file after each step
    step = Engine.step

    def looking(self):
        sizes.append(target.read_bytes().count(b"\n"))
        return step(self)

    monkeypatch.setattr(Engine, "step", looking)
    run(
        *("batch", prompts(tmp_path, *lines), "--model", TINY, "--max-batch", "2"),
        *("--max-new-tokens", "4", "-o", str(target)),
    )
    found = answers(target.read_text("utf-8"))
    assert [answer["line"] for answer in found] == list(range(1, 31))
    assert found[0]["new_tokens"] == 60
    assert sizes[58] == 0
    # the others did not wait for the first one: ever more of them, two at a time
    assert max(sizes) - sizes[58] > 10
    assert sorted(set(sizes[62:])) != [0]


def test_a_slow_line_does_not_stop_the_others(run, tmp_path, monkeypatch):
    lines = [{"prompt": "Hello", "ignore_eos": True, "max_tokens": 3}] * 40
    lines[0] = {**lines[0], "max_tokens": 400}
    seen = submitted(monkeypatch)
    steps = []
    step = Engine.step

    def looking(self):
        steps.append(len(seen))
        return step(self)

    monkeypatch.setattr(Engine, "step", looking)
    run("batch", prompts(tmp_path, *lines), "--model", TINY, "--max-batch", "2")
    assert steps[0] == 4 * 2, "no more are submitted than so many times the batch"
    assert steps[300] == 40


def test_the_engine_is_given_a_few_lines_at_a_time(run, tmp_path, monkeypatch):
    taken, written = 0, 0
    most = 0

    class Source:
        def __iter__(self):
            nonlocal taken
            for n in range(400):
                taken += 1
                yield lines_of({"prompt": f"{n}", "max_tokens": 1})

    class Target:
        def write(self, text):
            nonlocal written, most
            written += 1
            most = max(most, taken - written)

    tiny = tiny_llm.load(TINY)
    settings = batch.Settings(False, None, SamplingParams(max_tokens=1))
    with Engine(*tiny, max_batch=3) as engine:
        work = batch._Batch(engine, 3, settings, lambda line: "key", Target())
        waiting = 0
        for _ in work.run(batch.numbered(Source())):
            waiting = max(waiting, engine.stats.waiting + engine.stats.running)
    assert (taken, written, work.errors) == (400, 400, 0)
    assert waiting <= 12
    assert most <= 15


def test_lines_behind_an_unanswered_one_are_bounded(monkeypatch, tmp_path):
    """Bad lines cost nothing, but they wait for the slow one before them."""
    monkeypatch.setattr(batch, "_UNWRITTEN", 5)
    taken = 0

    def source():
        nonlocal taken
        slow = {"prompt": "Hello", "max_tokens": 50, "ignore_eos": True}
        for line in [slow] + [{}] * 100:
            taken += 1
            yield lines_of(line)

    class Target:
        count = 0

        def write(self, text):
            self.count += 1

    target = Target()
    settings = batch.Settings(False, None, SamplingParams())
    with Engine(*tiny_llm.load(TINY), max_batch=2) as engine:
        work = batch._Batch(engine, 2, settings, lambda line: "key", target)
        steps = work.run(batch.numbered(source()))
        for _ in range(20):
            next(steps)
        assert (taken, target.count) == (10, 0)
        for _ in steps:
            pass
    assert (taken, target.count, work.errors) == (101, 101, 100)


# --- stopping


def start(file, target, *options):
    # (slow enough to be met on its way: one line at a time, a token a step)
    return subprocess.Popen(
        [*PROGRAM, file, "--model", TINY, "-o", str(target), *options],
        stderr=subprocess.PIPE,
    )


def finish(process):
    """Its exit status and what it told."""
    _, err = process.communicate(timeout=300)
    return process.returncode, err.decode()


def wait_for_lines(process, target, count):
    deadline = time.monotonic() + 120
    while not target.exists() or target.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def decided(tiny):
    """Prompts whose next 60 tokens do not depend on the last bits of a product."""
    model, tokenizer = tiny
    found = []
    for n in range(30):
        ids = tokenizer.encode_chat([{"role": "user", "content": f"Hello {n}"}])
        out = list(tiny_llm.stream_generate(model, ids, max_new_tokens=60))
        logits = model(mx.array([ids + out]), logits_to_keep=61)[0]  # [61, V]
        best = mx.sort(logits, axis=-1)[:, -2:]
        if (best[:, 1] - best[:, 0]).min().item() > 1e-3:
            found.append(f"Hello {n}")
    assert len(found) > 10
    return found


@pytest.fixture
def long(tmp_path, decided):
    """Two hundred lines of sixty tokens each, but for one that is bad."""
    lines = [
        {
            "prompt": decided[n % len(decided)],
            "id": n,
            "ignore_eos": True,
            "max_tokens": 60,
        }
        for n in range(200)
    ]
    lines[3] = {"prompt": "", "id": 3}
    return prompts(tmp_path, *lines)


def test_a_kill_at_any_moment_loses_nothing_that_was_written(long, tmp_path):
    options = ("--max-batch", "8")
    whole = tmp_path / "whole.jsonl"
    assert finish(start(long, whole, *options)) == (1, ANY)
    target = tmp_path / "answers.jsonl"
    kept = []
    for count in (1, 70, 130):
        process = start(long, target, *options)
        wait_for_lines(process, target, count)
        os.kill(process.pid, signal.SIGKILL)
        assert finish(process)[0] == -signal.SIGKILL
        # what a kill in the middle of a write would leave
        done = target.read_bytes()
        kept.append(done.count(b"\n"))
        target.write_bytes(done + b'{"line": 99, "text": "to')
    assert kept == sorted(kept)
    assert kept[-1] < 200, "the last one must be killed on its way too"
    status, err = finish(start(long, target, *options))
    assert status == 1
    assert f"({kept[-1]} lines are answered already, 1 of them by an error)" in err
    texts = [path.read_text("utf-8") for path in (target, whole)]
    assert lasting(texts[0]) == lasting(texts[1])
    assert [answer["id"] for answer in answers(texts[0])] == list(range(200))


def test_ctrl_c_keeps_what_is_done(long, tmp_path):
    target = tmp_path / "answers.jsonl"
    process = start(long, target, "--max-batch", "8")
    wait_for_lines(process, target, 20)
    process.send_signal(signal.SIGINT)
    status, err = finish(process)
    assert status == 130
    lines = err.splitlines()
    assert lines[0].startswith("tiny-llm: line 4: the prompt is empty")
    assert " tokens/s; " in lines[1]
    assert lines[2:] == ["tiny-llm: interrupted"]
    found = answers(target.read_text("utf-8"))
    assert [answer["line"] for answer in found] == list(range(1, len(found) + 1))
    assert 20 <= len(found) < 200
    assert finish(start(long, target, "--max-batch", "8"))[0] == 1
    assert len(answers(target.read_text("utf-8"))) == 200


def test_a_closed_pipe_ends_it_quietly(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*PROGRAM, prompts(tmp_path, {"prompt": "Hello"}), *SHORT],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=300,
        )
    finally:
        os.close(writing)
    assert done.returncode == 141
    assert done.stderr == b""


def test_a_bar_at_a_terminal_tells_how_far_it_is(tmp_path):
    import pty

    lines = [{"prompt": "x", "ignore_eos": True, "max_tokens": 50} for _ in range(9)]
    lines[0] = {"prompt": ""}
    command = ("batch", prompts(tmp_path, *lines), "--model", TINY, "--max-batch", "1")
    at_once = (
        "import sys, tiny_llm.progress as p; p._PATIENCE = 0.0\n"
        f"from tiny_llm.cli import main; sys.exit(main({command!r}))"
    )
    end, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", at_once],
        stdout=subprocess.DEVNULL,
        stderr=there,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(there)
    shown = b""
    while True:
        try:
            part = os.read(end, 4096)
        except OSError:  # Linux, when the program has ended
            break
        if not part:
            break
        shown += part
    os.close(end)
    assert process.wait(60) == 1
    text = shown.decode("utf-8", "replace")
    assert "tiny-llm: line 1: the prompt is empty" in text
    assert "8 answers and 1 error, 400 tokens in " in text
    assert "Answering" in text
    assert re.search(r"\d answers, \d+ tokens/s", text)
