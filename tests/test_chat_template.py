import copy
from datetime import datetime

import pytest

from tiny_llm.chat_template import ChatTemplate, normalize_messages, parse_chat_template
from tiny_llm.errors import ChatTemplateError, TokenizerError

USER = [{"role": "user", "content": "Hi"}]


def render(source, messages=USER, **options):
    return ChatTemplate({"default": source}).render(messages, **options)


# Hugging Face's convention


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\nx\n{% endif %}\ny", "x\ny"),
        ("a\n   {% if true %}b{% endif %}", "a\nb"),
        ("x\n", "x"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}"
         "{% endfor %}", "1"),
        ("{% for m in [1, 2] %}{% if m == 1 %}{% continue %}{% endif %}{{ m }}"
         "{% endfor %}", "2"),
        ("{{ {'a': '<é&\"\\'>'} | tojson }}", '{"a": "<é&\\"\'>"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}",
         '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}.", "Hi."),
        ("{{ missing }}|{{ tools is none }}|{{ documents is none }}", "|True|True"),
        ("{{ add_generation_prompt }}", "True"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}"
         "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)  # fmt: skip
def test_templates_render_as_their_authors_saw_them(source, expected):
    assert render(source) == expected


def test_loops_keep_their_variables_while_being_counted():
    source = (
        "{% for x in ['a', 'b', 'c'] if x != 'b' %}{{ loop.index }}/{{ loop.length }}"
        "{{ x }}{{ loop.last }}{{ loop.nextitem }};{% endfor %}"
        "{% for k, v in {'p': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}"
        "{% for x in nothing %}{% else %}empty{% endfor %}"
        "{% for x in [1, [2, [3]]] recursive %}"
        "{{ x if x is number else loop(x) }}{% endfor %}"
    )
    assert render(source) == "1/2aFalsec;2/2cTrue;p1empty123"


def test_strftime_now_is_the_local_time():
    now = [datetime.now().strftime("%d %b %Y")]
    rendered = render("{{ strftime_now('%d %b %Y') }}")
    now.append(datetime.now().strftime("%d %b %Y"))  # midnight may lie in between
    assert rendered in now


def test_variables_win_over_the_defaults():
    source = "{{ strftime_now }}{{ documents }}{{ bos_token }}"
    variables = {"strftime_now": 1, "documents": 2, "bos_token": 3}
    assert render(source, variables=variables) == "123"


# Which template


def test_no_template_says_so():
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate({}).render(USER)


def test_the_tool_template_is_taken_only_with_tools():
    template = ChatTemplate({"default": "d", "tool_use": "t"})
    assert template.render(USER) == "d"
    assert template.render(USER, tools=[]) == "d"
    assert template.render(USER, tools=[{"type": "function"}]) == "t"


def test_without_a_default_the_names_are_listed():
    template = ChatTemplate({"rag": "r", "tool_use": "t"})
    with pytest.raises(ChatTemplateError, match="only rag, tool_use"):
        template.render(USER)


def test_templates_are_read_as_a_string_or_by_name():
    assert parse_chat_template(None, "f") == {}
    assert parse_chat_template("x", "f") == {"default": "x"}
    named = [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]
    assert parse_chat_template(named, "f") == {"a": "x", "b": "y"}
    for wrong in (1, {"a": "b"}, ["x"], [{"name": "a", "template": None}]):
        with pytest.raises(TokenizerError, match=r"^f: chat_template"):
            parse_chat_template(wrong, "f")


# Messages (field case 17)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ("x", "x"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": " b"}], "a b"),
    ],
)
def test_content_becomes_a_string(content, expected):
    message = {"role": "assistant", "content": content, "tool_calls": [{"id": "1"}]}
    before = copy.deepcopy(message)
    normal = normalize_messages([message])
    assert normal == [{**message, "content": expected}]
    assert message == before


def test_a_tool_turn_may_have_no_content_at_all():
    turn = {"role": "assistant", "tool_calls": []}
    assert normalize_messages([turn])[0]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("Hi", "messages must be a list of messages, not str"),
        ({"role": "user"}, "messages must be a list of messages, not dict"),
        (None, "messages must be a list of messages, not NoneType"),
        ([], "messages is empty"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([*USER, {"content": "x"}], r"messages\[1\]\.role must be .* not None"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role must be .* not 1"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\] \(role 'user'\) has no content"),
        (
            [{"role": "user", "content": 3}],
            r"messages\[0\]\.content must be .* not int",
        ),
        ([{"role": "user", "content": {"a": 1}}], r"content must be .* not dict"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is not a part"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\] has the type 'image_url'",
        ),
    ],
)
def test_malformed_messages_are_refused_by_name(messages, named):
    with pytest.raises(ChatTemplateError, match=named):
        render("x", messages)


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ("x", "tools must be a list"),
        ({"a": 1}, "tools must be a list"),
        (["x"], r"tools\[0\] must be an object"),
    ],
)
def test_malformed_tools_are_refused_by_name(tools, named):
    with pytest.raises(ChatTemplateError, match=named):
        render("x", tools=tools)


# Templates that fail (field case 20)


def test_a_template_that_raises_is_quoted():
    with pytest.raises(ChatTemplateError) as error:
        render("{{ raise_exception('roles must alternate') }}")
    expected = "the chat template refused the messages: roles must alternate"
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{% if %}", "broken: line 1"),
        ("a\n{% for x in y %}", "broken: line 2"),
        ("{{ nope.x }}", "'nope' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson | nofilter }}", "nofilter"),
        ("{{ " + "(" * 5000 + " }}", "RecursionError"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_faulty_template_says_what_is_wrong(source, named):
    with pytest.raises(ChatTemplateError, match=named):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages[0].content.format.__self__.__class__.__base__ }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(ChatTemplateError, match=r"SecurityError|UndefinedError"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{{ f(40) }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 9 * [1] }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set ns = namespace(n=3) %}{% for i in range(60) %}"
        "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    ],
)
def test_endless_work_ends_in_an_error(source, monkeypatch):
    monkeypatch.setattr("tiny_llm.chat_template.MAX_STEPS", 10_000)
    with pytest.raises(ChatTemplateError, match=r"OverflowError|RecursionError"):
        render(source)


def test_each_rendering_has_its_own_budget(monkeypatch):
    monkeypatch.setattr("tiny_llm.chat_template.MAX_STEPS", 10)
    template = ChatTemplate({"default": "{% for i in [1] * 9 %}{{ i }}{% endfor %}"})
    assert [template.render(USER) for _ in range(3)] == ["1" * 9] * 3


# What a template can be told


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ({}, set()),
        ({"default": "{{ messages[0].content }}"}, {"messages"}),
        ({"default": "{% if x is defined and x %}{% endif %}"}, {"x"}),
        (
            {"default": "{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}"},
            {"x"},
        ),
        ({"default": "{% set x = y | default(1) %}{{ x }}"}, {"y"}),
        ({"default": "{% for m in messages %}{{ m.x }}{% endfor %}"}, {"messages"}),
        ({"default": "{% generation %}{{ x }}{% endgeneration %}"}, {"x"}),
        ({"default": "{{ x }}", "tool_use": "{{ tools }}"}, {"x", "tools"}),
    ],
)
def test_the_variables_of_templates_are_those_that_they_read(sources, names):
    assert ChatTemplate(sources).variables() == names


def test_the_variables_of_a_broken_template_are_an_error():
    with pytest.raises(ChatTemplateError, match="broken: line 1"):
        ChatTemplate({"default": "{% if"}).variables()
