"""`tiny-llm cache`: the answers of `tiny-llm generate`, from saved beginnings."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import tiny_llm
from tiny_llm.cache_file import inspect

DATA = Path(__file__).parent / "data"
TINY = str(DATA / "llama_llama3rope_bias")  # 384 tokens, a context of 512
TIED = str(DATA / "llama_tied")
TEXT = "A whale is a mammal that lives in the sea. " * 4


@pytest.fixture(scope="module")
def tiny():
    return tiny_llm.load(TINY)


def write_model(folder, **changes):
    """A folder with random weights, and the tokenizer of TINY."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(TINY) / name, folder)
    config = json.loads((DATA / "mistral_swa" / "config.json").read_text())
    config |= {"vocab_size": 384, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q, inner = heads * config["head_dim"], config["intermediate_size"]
    kv = q // heads * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (384, hidden), "lm_head": (384, hidden)}
    norms = ["model.norm"]
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        for part, outputs in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{stem}.self_attn.{part}_proj"] = (outputs, hidden)
        shapes[f"{stem}.self_attn.o_proj"] = (hidden, q)
        for part in ("gate", "up"):
            shapes[f"{stem}.mlp.{part}_proj"] = (inner, hidden)
        shapes[f"{stem}.mlp.down_proj"] = (hidden, inner)
        norms += [f"{stem}.input_layernorm", f"{stem}.post_attention_layernorm"]
    weights = {
        f"{name}.weight": rng.normal(0, 2 * shape[1] ** -0.5, shape).astype("f4")
        for name, shape in shapes.items()
    }
    weights |= {f"{name}.weight": np.ones(hidden, "f4") for name in norms}
    save_file(weights, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model whose layers see windows of 12 tokens."""
    return write_model(tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model with full attention and heads of 32 numbers, which can be packed."""
    folder = tmp_path_factory.mktemp("wide")
    return write_model(folder, sliding_window=None, head_dim=32)


@pytest.fixture
def make(run, tmp_path):
    """Run `cache make` for a model, successfully; returns the file's path."""

    def make(*arguments, model=TINY, stdin=b""):
        path = str(tmp_path / "saved.kv")
        options = ("--model", model, "--force")
        status, out, err = run("cache", "make", path, *arguments, *options, stdin=stdin)
        assert (status, err) == (0, "")
        facts = inspect(path)
        assert f"{path}: {facts.tokens:,} tokens, {facts.bytes:,} bytes" in out
        return path

    return make


def reused(err):
    found = re.search(r"reused +(\d+) tokens, of (\d+) in the file", err)
    return int(found[1]), int(found[2])


# --- use


WAYS = {
    "chat": (),
    "system": ("--system", "Be brief."),
    "raw": ("--raw",),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", ["Why?", " And why?", "", "\nX", "mal", "é"])
def test_the_answer_is_that_of_generate_for_the_whole_text(run, make, way, prompt):
    options = ("--max-new-tokens", "20")
    path = make(TEXT, *WAYS[way])
    status, out, err = run("cache", "use", path, prompt, *options)
    expected = run("generate", TEXT + prompt, "--model", TINY, *WAYS[way], *options)
    assert (status, out) == expected[:2]
    kept, saved = reused(err)
    assert 0 <= saved - kept <= 1
    assert saved > 30
    whole = int(re.search(r"prompt +(\d+) tokens", expected[2])[1])
    assert f"prompt       {whole - kept:6d} tokens" in err
    assert err.rstrip().endswith(expected[2].split()[-1])


KINDS = {
    "dense": (),
    "paged": ("--kind", "paged"),
    "rotating": ("--kind", "rotating"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_exact_kinds_answer_alike_with_windows_too(run, make, windowed, kind):
    path = make(TEXT, *KINDS[kind], "--prefill-chunk", "16", model=windowed)
    assert inspect(path).kind == kind
    options = ("--max-new-tokens", "40")
    status, out, err = run("cache", "use", path, "Why?", *options)
    expected = run("generate", TEXT + "Why?", "--model", windowed, *options)
    assert (status, out) == expected[:2]
    assert reused(err)[0] > 30


@pytest.mark.parametrize(
    ("arguments", "kind", "options"),
    [
        (("quantized",), "quantized", {"bits": 8}),
        (("quantized", "--kv-bits", "4"), "quantized", {"bits": 4}),
        (("paged", "--kv-bits", "8"), "paged", {"bits": 8, "page_size": 64}),
        (
            ("rotating", "--window", "20", "--keep", "4"),
            "rotating",
            {"window": 20, "keep": 4},
        ),
        (
            ("rotating", "--window", "20", "--kv-bits", "4"),
            "rotating",
            {"window": 20, "keep": 0, "bits": 4},
        ),
    ],
    ids=str,
)
def test_other_kinds_answer_as_the_same_kind_without_a_file(
    run, make, wide, arguments, kind, options
):
    packed = {"group_size": 32} if "bits" in options else {}
    path = make(TEXT, "--kind", *arguments, model=wide)
    assert inspect(path)[2:4] == (kind, {**options, **packed})
    status, out, _ = run("cache", "use", path, "Why?", "--max-new-tokens", "12")
    model, tokenizer = tiny_llm.load(wide)
    sizes = {"tokens": 512} if kind == "paged" else {}
    cache = model.create_kv_cache(kind, **options, **packed, **sizes)
    messages = [{"role": "user", "content": TEXT + "Why?"}]
    expected = tiny_llm.generate(
        model, tokenizer, messages, max_new_tokens=12, cache=cache
    )
    assert (status, out) == (0, expected.text + "\n")


def test_a_text_that_begins_otherwise_is_computed_anew_and_said(run, make, tmp_path):
    path = make("Hello there", "--system", "Be brief.")
    saved = tiny_llm.load_kv_cache(path, tiny_llm.load_model(TINY))
    notes = {**saved.notes, "system": "Be long."}
    model = tiny_llm.load_model(TINY)
    tiny_llm.save_kv_cache(path, model, saved.cache, saved.token_ids, notes=notes)
    options = ("--max-new-tokens", "20")
    status, out, err = run("cache", "use", path, "!", *options)
    system = ("--system", "Be long.", "--model", TINY)
    assert (status, out) == run("generate", "Hello there!", *system, *options)[:2]
    assert 0 < reused(err)[0] < 15


def test_a_window_that_has_passed_is_computed_anew_and_said(run, make, windowed):
    path = make(TEXT, "--kind", "rotating", model=windowed)
    saved = tiny_llm.load_kv_cache(path, tiny_llm.load_model(windowed))
    notes = {**saved.notes, "text": TEXT[:20]}
    model = tiny_llm.load_model(windowed)
    tiny_llm.save_kv_cache(path, model, saved.cache, saved.token_ids, notes=notes)
    options = ("--max-new-tokens", "20")
    status, out, err = run("cache", "use", path, "X", *options)
    expected = run("generate", TEXT[:20] + "X", "--model", windowed, *options)
    assert (status, out) == expected[:2]
    assert "nothing of" in err
    assert "cannot rewind" in err
    assert reused(err)[0] == 0


def test_sampling_options_reach_the_sampler(run, make):
    path = make(TEXT)
    options = ("--temperature", "2", "--seed", "3", "--max-new-tokens", "20")
    status, out, _ = run("cache", "use", path, "Why?", *options)
    expected = run("generate", TEXT + "Why?", "--model", TINY, *options)
    assert (status, out) == expected[:2]
    plain = run("cache", "use", path, "Why?", "--max-new-tokens", "20")
    assert plain[1] != out


def test_a_dash_reads_the_prompt_from_standard_input(run, make):
    path = make(TEXT)
    options = ("--max-new-tokens", "12")
    status, out, _ = run("cache", "use", path, "-", *options, stdin=b"Why?\n")
    assert (status, out) == run("cache", "use", path, "Why?", *options)[:2]


def test_the_model_is_the_one_of_the_file_unless_told(run, make, tmp_path, monkeypatch):
    monkeypatch.chdir(DATA)
    path = make(TEXT, "--quantize", "8bit", model=Path(TINY).name)
    monkeypatch.chdir(tmp_path)
    options = ("--max-new-tokens", "12")
    status, out, _ = run("cache", "use", path, "Why?", *options)
    model = ("--model", TINY, "--quantize", "8bit")
    assert (status, out) == run("generate", TEXT + "Why?", *model, *options)[:2]
    copy = shutil.copytree(TINY, tmp_path / "copy")
    assert run("cache", "use", path, "Why?", "--model", str(copy), *options)[:2] == (
        0,
        out,
    )
    status, out, err = run("cache", "use", path, "Why?", "--model", TIED)
    assert (status, out) == (1, "")
    assert "is for a llama model" in err


def test_an_answer_that_was_stopped_exits_with_130(run, make, monkeypatch):
    from tiny_llm.text import TextStream

    path = make(TEXT)
    following = TextStream.next_part

    def interrupted(self):
        if self.result.token_ids:
            signal.raise_signal(signal.SIGINT)
        return following(self)

    monkeypatch.setattr(TextStream, "next_part", interrupted)
    status, _, err = run("cache", "use", path, "Why?")
    assert status == 130
    assert err.rstrip().endswith("interrupted")


def test_stop_ends_the_answer(run, make):
    path = make(TEXT)
    whole = run("cache", "use", path, "Why?", "--max-new-tokens", "12")[1]
    stop = whole[4:6]
    status, out, err = run("cache", "use", path, "Why?", "--stop", stop)
    assert (status, out) == (0, whole[: whole.index(stop)] + "\n")
    assert err.rstrip().endswith("stop")


# --- make


def test_the_file_holds_the_tokens_that_stay_however_the_text_goes_on(make, tiny):
    path = make("Hello there", "--system", "Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello there, you"},
    ]
    ids = tiny.tokenizer.encode_chat(messages)
    saved = tiny_llm.load_kv_cache(path, tiny.model)
    assert saved.token_ids == ids[: len(saved.token_ids)]
    assert len(saved.token_ids) > 20
    assert saved.notes == {
        "text": "Hello there",
        "mode": "chat",
        "system": "Be brief.",
        "model": TINY,
        "dtype": "auto",
    }


def test_a_system_message_alone_is_a_beginning(run, make):
    path = make("--system", "Be brief.")
    options = ("--max-new-tokens", "20")
    status, out, err = run("cache", "use", path, "Hello", *options)
    system = ("--system", "Be brief.", "--model", TINY)
    assert (status, out) == run("generate", "Hello", *system, *options)[:2]
    assert reused(err)[0] > 10


def test_a_dash_reads_the_text_with_its_last_newline(make):
    assert inspect(make("-", stdin="Grüße\n".encode())).notes["text"] == "Grüße\n"


def test_a_model_without_chat_template_makes_a_beginning_of_a_text(
    run, make, no_template
):
    path = make("Hello there", model=no_template)
    assert inspect(path).notes["mode"] == "raw"
    status, out, _ = run("cache", "use", path, " you", "--max-new-tokens", "9")
    options = ("--model", no_template, "--max-new-tokens", "9")
    assert (status, out) == run("generate", "Hello there you", *options)[:2]


def test_an_existing_file_is_kept_without_force(run, tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    arguments = ("cache", "make", str(path), "Hello", "--model", TINY)
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    assert "exists already; --force replaces it" in err
    assert path.read_text() == "data"
    assert run(*arguments, "--force")[0] == 0
    assert inspect(path).tokens > 0


def test_prefill_chunk_cuts_the_text(run, make, monkeypatch):
    from tiny_llm.models import Decoder

    lengths = []
    call = Decoder.__call__

    def counting(self, ids, *arguments, **options):
        lengths.append(ids.shape[1])
        return call(self, ids, *arguments, **options)

    monkeypatch.setattr(Decoder, "__call__", counting)
    path = make(TEXT, "--prefill-chunk", "16")
    tokens = inspect(path).tokens
    assert lengths == [16] * (tokens // 16) + [tokens % 16] * (tokens % 16 > 0)
    lengths.clear()
    options = ("--prefill-chunk", "4", "--max-new-tokens", "1")
    run("cache", "use", path, "Why is that so?", *options)
    assert lengths[:2] == [4, 4]


def test_ctrl_c_leaves_no_file(run, tmp_path, monkeypatch):
    from tiny_llm.models import Decoder

    def interrupt(self, *arguments, **options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Decoder, "__call__", interrupt)
    path = tmp_path / "saved.kv"
    status, out, err = run("cache", "make", str(path), "Hello", "--model", TINY)
    assert (status, out, err) == (130, "", "tiny-llm: interrupted\n")
    assert os.listdir(tmp_path) == []


# --- show


def test_show_tells_what_a_file_holds(run, make, wide):
    path = make(TEXT, "--system", "Be brief.", "--kind", "quantized", model=wide)
    status, out, err = run("cache", "show", path)
    facts = inspect(path)
    assert (status, err) == (0, "")
    for line in (
        "format version      1",
        f"model               {wide}",
        "architecture        mistral",
        "KV heads            2",
        "cache               quantized (bits 8, group size 32)",
        "dtype               float32",
        f"tokens              {facts.tokens}",
        f"bytes               {Path(path).stat().st_size:,}",
        "mode                chat",
        'system              "Be brief."',
        'text                "A whale is a mammal that lives in the sea. A whale',
    ):
        assert line in out
    status, out, err = run("cache", "show", path, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(facts._asdict()))
    assert json.loads(out)["notes"]["text"] == TEXT


def test_show_and_use_of_a_file_from_the_library(run, tiny, tmp_path):
    path = str(tmp_path / "x")
    cache = tiny.model.create_kv_cache()
    ids = [5, 6, 7]
    list(tiny_llm.stream_generate(tiny.model, ids, max_new_tokens=0, cache=cache))
    tiny_llm.save_kv_cache(path, tiny.model, cache, ids)
    status, out, _ = run("cache", "show", path)
    assert status == 0
    assert "model               (not noted)" in out
    assert "tokens              3" in out
    status, out, err = run("cache", "use", path, "x")
    assert (status, out) == (1, "")
    assert "was not made by `tiny-llm cache make`" in err


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["list"], "invalid choice: 'list'"),
        (["make"], "required: FILE"),
        (["make", "f"], "TEXT or --system is needed"),
        (["make", "f", "x", "--raw", "--chat"], "not allowed with"),
        (["make", "f", "x", "--raw", "--system", "s"], "no effect with --raw"),
        (["make", "f", "x", "--kv-bits", "8"], "--kv-bits has no effect with --kind"),
        (["make", "f", "x", "--kv-bits", "3"], "invalid choice: 3"),
        (["make", "f", "x", "--kind", "ring"], "invalid choice: 'ring'"),
        (
            ["make", "f", "x", "--kind", "paged", "--window", "9"],
            "--window has no effect with --kind paged, only with --kind rotating",
        ),
        (["make", "f", "x", "--keep", "9"], "--keep has no effect with --kind dense"),
        (
            ["make", "f", "x", "--kind", "rotating", "--keep", "9"],
            "--keep has no effect without --window",
        ),
        (["make", "f", "x", "--window", "0"], "'0' is not a whole number from 1"),
        (["make", "f", "x", "--seed", "1"], "unknown arguments: --seed 1"),
        (["use", "f"], "required: PROMPT"),
        (["use", "f", "x", "--system", "s"], "unknown arguments: --system s"),
        (["use", "f", "x", "--top-k", "3"], "no effect at temperature 0"),
        (["show"], "required: FILE"),
        (["show", "f", "--model", "x"], "unknown arguments: --model x"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(run, arguments, message):
    status, out, err = run("cache", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make", "{}/f", "x", "--model", "nowhere"], "no model at 'nowhere'"),
        (["make", "{}", "x", "--model", TINY], "is a folder"),
        (["make", "{}/no/f", "x", "--model", TINY], "there is no folder"),
        (["make", "{}/f", "x" * 600, "--model", TINY], "context is 512"),
        (["make", "{}/f", "\udcff", "--model", TINY], "TEXT is not UTF-8"),
        (
            ["make", "{}/f", "x", "--kind", "rotating", "--model", TINY],
            "a rotating cache needs a window",
        ),
        (
            ["make", "{}/f", "x", "--kind", "quantized", "--model", TINY],
            "a head of 16 numbers cannot be packed",
        ),
        (["use", "{}/f", "x"], "is missing"),
        (["show", "{}/f"], "is missing"),
        (["show", TIED + "/model.safetensors"], "no cache that tiny_llm saved"),
        (["show", TIED + "/config.json"], "does not begin as a safetensors file"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_an_error_is_one_plain_line_and_exit_status_1(
    run, tmp_path, arguments, message
):
    arguments = [argument.replace("{}", str(tmp_path)) for argument in arguments]
    status, out, err = run("cache", *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("tiny-llm: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_chat_needs_a_chat_template(run, no_template, tmp_path):
    for option in (("x", "--chat"), ("--system", "s")):
        path = str(tmp_path / "f")
        status, out, err = run("cache", "make", path, *option, "--model", no_template)
        assert (status, out) == (1, "")
        assert "no chat template" in err
    assert os.listdir(tmp_path) == []


def test_a_prompt_that_does_not_fit_is_refused(run, make):
    path = make(TEXT)
    for kind in ((), ("--kind", "paged")):
        path = make(TEXT, *kind)
        status, out, err = run("cache", "use", path, "x" * 600)
        assert (status, out) == (1, "")
        assert "context is 512" in err


@pytest.mark.smollm2
def test_the_default_model_answers_as_without_a_file(run, make, smollm2_gguf):
    text = "The sky is blue because of Rayleigh scattering. " * 6
    options = ("--max-new-tokens", "24")
    path = make(text, "--system", "Be brief.", model=str(smollm2_gguf))
    status, out, err = run("cache", "use", path, "Why is the sky blue?", *options)
    generate = ("--system", "Be brief.", "--model", str(smollm2_gguf), *options)
    expected = run("generate", text + "Why is the sky blue?", *generate)
    assert (status, out) == expected[:2]
    assert reused(err)[0] > 60


@pytest.mark.parametrize(
    "arguments",
    [
        ("{file}", "--raw", "Once upon a time there was a"),
        ("{file}", "--kind", "paged", "--raw", "-"),
        ("--raw", "{file}", "Once upon a time there was a"),
        ("--raw", "{file}", "--prefill-chunk", "4", "Once upon a time there was a"),
    ],
)
def test_options_may_stand_anywhere(run, tmp_path, arguments):
    path = str(tmp_path / "made.kv")
    given = [argument.format(file=path) for argument in arguments]
    text = b"Once upon a time there was a"
    status, _, err = run("cache", "make", *given, "--model", TINY, stdin=text)
    assert (status, err) == (0, "")
    assert inspect(path).notes["text"] == text.decode()
    status, _, err = run("cache", "make", *given, "more", "--model", TINY, stdin=text)
    assert status == 2
    assert "unknown arguments" in err
