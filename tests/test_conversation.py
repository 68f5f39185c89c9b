import pytest
from oracle import DATA, random_model
from thinking_model import TEMPLATE, scripted, thinking

import tiny_llm
from tiny_llm.conversation import Conversation
from tiny_llm.errors import ParameterError, PromptError


@pytest.fixture(scope="module")
def loaded():
    return tiny_llm.load(DATA / "llama_llama3rope_bias")


def fresh(loaded, messages, n):
    """The answer of a run without any reuse."""
    return tiny_llm.generate(*loaded, messages, max_new_tokens=n)


@pytest.mark.parametrize("stop_early", [False, True])
def test_answers_equal_fresh_runs_over_the_whole_conversation(loaded, stop_early):
    chat = Conversation(*loaded, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, question in enumerate(["Hello there", "What now?", "And then?"]):
        messages.append({"role": "user", "content": question})
        stream = chat.ask(question, max_new_tokens=12)
        pieces = []
        for piece in stream:
            pieces.append(piece)
            if stop_early and len(pieces) == 3:
                stream.close()
        expected = fresh(loaded, messages, 12)
        tokens = stream.result.token_ids
        assert tokens == expected.token_ids[: len(tokens)]
        if not stop_early:
            assert tokens == expected.token_ids
        messages.append({"role": "assistant", "content": "".join(pieces)})
        assert (chat.reused > 0) == (turn > 0)
    assert chat.messages == messages[:-1]


def test_a_later_turn_computes_only_what_is_new(loaded):
    chat = Conversation(*loaded)
    first = chat.ask("Hello there, this is a long question", max_new_tokens=4)
    list(first)
    second = chat.ask("Hm", max_new_tokens=1)
    whole = loaded.tokenizer.encode_chat(chat.messages)
    assert chat.reused >= first.result.prompt_tokens
    assert second.result.prompt_tokens == len(whole) - chat.reused


def test_reset_forgets_all_but_the_system_message(loaded):
    chat = Conversation(*loaded, system="Be brief.")
    before = list(chat.ask("Hello", max_new_tokens=8))
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert list(chat.ask("Hello", max_new_tokens=8)) == before
    assert chat.reused == 0


def test_a_question_that_does_not_fit_leaves_the_conversation_as_it_was(loaded):
    chat = Conversation(*loaded)
    list(chat.ask("Hello", max_new_tokens=8))
    with pytest.raises(PromptError, match="context is 512"):
        chat.ask("x" * 9000)
    answer = list(chat.ask("Hi again", max_new_tokens=8))
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "user"]
    expected = fresh(loaded, chat.messages, 8)
    assert "".join(answer) == expected.text


def test_an_interrupt_between_two_layers_is_repaired(loaded):
    chat = Conversation(*loaded)
    stream = chat.ask("Hello", max_new_tokens=30)
    next(stream)
    # as if Ctrl-C had come when only the first layer had the next token
    chat._cache[0].offset += 1
    chat.ask("Next", max_new_tokens=5)
    offsets = {entry.offset for entry in chat._cache}
    assert len(offsets) == 1
    answer = "".join(chat._open)
    assert answer == fresh(loaded, chat.messages, 5).text


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", {"reserve": 200}),
        ("rotating", {}),
        ("paged", {"tokens": 512, "page_size": 4}),
    ],
)
def test_turns_over_any_cache_answer_as_fresh_runs(loaded, kind, options):
    model = random_model("mistral_swa", sliding_window=8, vocab_size=384)
    chat = Conversation(
        model,
        loaded.tokenizer,
        create_cache=lambda: model.create_kv_cache(kind, **options),
    )

    def answer(question):
        pieces = list(chat.ask(question, max_new_tokens=10))
        expected = fresh((model, loaded.tokenizer), chat.messages, 10)
        assert "".join(pieces) == expected.text
        return chat.reused

    assert answer("Hello there, this is a long first question " * 4) == 0
    assert answer("What now?") > 100
    if kind == "paged":  # its pages are small: the window has passed the beginning
        chat.messages[0]["content"] = "Hello there, and now for something else"
        assert answer("And then?") == 0
    chat.reset()
    assert answer("Hello") == 0


# As some templates do: earlier reasoning stays in the prompt.
KEEPING = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}",
)


@pytest.mark.parametrize("keeps", [False, True])
def test_earlier_reasoning_is_in_the_prompt_only_if_the_template_wants_it(keeps):
    model = thinking(KEEPING if keeps else TEMPLATE)
    chat = Conversation(*model)
    said = "Hm.\n</think>\n\nYes."
    first = chat.ask("Hello", sampler=scripted(model.tokenizer, said))
    assert "".join(first) == "Yes."
    second = chat.ask("Sure?", sampler=scripted(model.tokenizer, said))
    assert chat.messages == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Sure?"},
    ]
    prompt = model.tokenizer.render_chat(chat.messages)
    assert ("Hm." in prompt) == keeps
    ids = model.tokenizer.encode(prompt, add_special_tokens=False)
    assert chat.reused + second.result.prompt_tokens == len(ids)
    if keeps:  # all but the EOS token: the template has another one
        assert (
            chat.reused >= first.result.prompt_tokens + len(first.result.token_ids) - 1
        )
    else:  # up to where the reasoning began: "<think>" and a newline were there
        assert chat.reused == first.result.prompt_tokens - 2


@pytest.mark.parametrize("template", [TEMPLATE, KEEPING], ids=["drops", "keeps"])
@pytest.mark.parametrize("enable", [True, False])
def test_a_thinking_models_answers_equal_fresh_runs(template, enable):
    model = thinking(template)
    options = {"enable_thinking": enable}
    chat = Conversation(*model, template_options=options)
    for question in ["Hello there", "What now?", "And then?"]:
        # (one that says nothing of its own would not show what it was given)
        stream = chat.ask(question, max_new_tokens=12)
        list(stream)
        expected = tiny_llm.generate(
            *model, chat.messages, max_new_tokens=12, template_options=options
        )
        assert stream.result.token_ids == expected.token_ids
        assert stream.result.reasoning == expected.reasoning
        assert bool(expected.reasoning) == enable


def test_a_turn_after_a_stop_string_equals_a_fresh_run(loaded):
    chat = Conversation(*loaded)
    whole = fresh(loaded, [{"role": "user", "content": "Hello"}], 12)
    stop = whole.text[3:5]
    first = chat.ask("Hello", max_new_tokens=12, stop=stop)
    assert "".join(first) == whole.text[: whole.text.index(stop)]
    second = chat.ask("And?", max_new_tokens=12)
    assert chat.messages[1]["content"] == first.result.text
    assert "".join(second) == fresh(loaded, chat.messages, 12).text


def test_template_options_of_no_template_are_refused(loaded):
    chat = Conversation(*loaded, template_options={"enable_thinking": True})
    with pytest.raises(ParameterError, match="no variable 'enable_thinking'"):
        chat.ask("Hello")
