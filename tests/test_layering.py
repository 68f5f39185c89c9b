"""Imports run one way, from people to kernels; see docs/architecture.md."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tiny_llm"

# From the bottom up: a module imports only from layers below its own, or its own.
LAYERS = [
    {"errors", "files"},
    {
        *("blas", "progress", "json_files", "config", "memory", "devices"),
        *("stop_strings", "result"),
    },
    {"roofline"},
    {"kernels"},
    {"cache", "layers", "rope", "token_masks"},
    {"attention"},
    {"models"},
    {"sampling", "fuse", "quantize"},
    {
        *("hub", "hub_progress", "default_model"),
        *("weight_files", "gguf_header", "gguf_config", "gguf_file"),
        *("chat_template", "detokenizer", "gguf_pretokenizers", "gguf_tokenizer"),
        *("folder_tokenizer", "tokenizer"),
        *("reasoning", "answer_text", "grammar"),
    },
    {"loader", "chooser", "speculation", "tensor_file", "cache_facts", "cache_file"},
    {"decoding", "generation", "beam_hypotheses", "beam"},
    {"text"},
    {"conversation"},
    {"engine"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Plain Python, to be tested without a device: top-level modules, or files by path.
WITHOUT_MLX = {
    *("errors", "files", "json_files", "config", "chat_template", "hub"),
    *("memory", "devices", "roofline", "result", "stop_strings"),
    *("sampling/checks.py", "sampling/params.py", "sampling/random_numbers.py"),
    *("sampling/history.py", "sampling/dry.py", "sampling/rules.py"),
    *("beam_hypotheses", "speculation/base.py", "speculation/prompt_lookup.py"),
    *("speculation/length.py", "speculation/drafting.py"),
    *("reasoning", "answer_text", "grammar/grammar.py", "grammar/schema.py"),
    *("engine/request.py", "engine/budget.py"),
    *("engine/scheduler.py", "cache/pages.py", "cache/prefix.py", "cache/lanes.py"),
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").parts
        if name != ("__init__",):
            yield path, name
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        yield path, ("kernels", path.stem)


def imported(path, name):
    """Top-level tiny_llm modules that a file imports, and the other packages."""
    inner, outer = set(), set()
    package = ("tiny_llm", *name)[: -1 if name[-1] != "__init__" else len(name)]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            targets = [node.module]
            if node.module == "tiny_llm":
                targets = [f"tiny_llm.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            if node.module:
                targets = [".".join((*base, node.module))]
            else:
                targets = [".".join((*base, alias.name)) for alias in node.names]
        else:
            continue
        for target in targets:
            parts = target.split(".")
            if parts[0] == "tiny_llm" and len(parts) > 1:
                inner.add(parts[1])
            else:
                outer.add(parts[0])
    return inner, outer


@pytest.mark.parametrize(
    ("path", "name"), [pytest.param(p, n, id=".".join(n)) for p, n in modules()]
)
def test_imports_run_one_way(path, name):
    own = name[0]
    assert own in LEVEL, f"put {own} into a layer"
    inner, outer = imported(path, name)
    inner -= {own, "__version__"}
    wrong = {other for other in inner if LEVEL.get(other, 0) > LEVEL[own]}
    assert not wrong, f"{own} imports {wrong} from above"
    if own == "kernels":
        assert inner <= {"errors"}, "kernels see arrays and numbers only"
        assert "kernels" not in outer
    if own in WITHOUT_MLX or "/".join(name) + ".py" in WITHOUT_MLX:
        assert not {o for o in outer if o.startswith("mlx")}
    # the name of a Hugging Face package: never imported as a top-level one
    assert "kernels" not in outer


def test_what_must_be_plain_exists():
    paths = {"/".join(name) + ".py" for _, name in modules()}
    assert {n if n.endswith(".py") else f"{n}.py" for n in WITHOUT_MLX} <= paths


def test_models_never_ask_which_cache_they_got():
    for path in [*(PACKAGE / "models").glob("*.py"), PACKAGE / "attention.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            asked = ast.unparse(node)
            assert node.func.id not in ("hasattr", "getattr", "type"), asked
            assert not (node.func.id == "isinstance" and "ache" in asked), asked


def test_files_stay_small():
    for path, name in modules():
        lines = len(path.read_text().splitlines())
        assert lines <= 400, f"{'.'.join(name)} has {lines} lines: it is two things"
