"""`tiny-llm plan`, against values worked out by hand."""

import functools
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest

DATA = Path(__file__).parent / "data"
LLAMA = str(Path(__file__).parent / "configs" / "llama-3.1-8b.json")
WINDOWED = str(DATA / "mistral_swa")
GIB = 2**30

# Llama-3.1-8B: per layer q and o 4096^2, k and v 4096 * 1024, the MLP 3 * 4096 * 14336
LAYERS = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
HEAD = 4096 * 128256
NORMS = 65 * 4096
PARAMETERS = LAYERS + 2 * HEAD + NORMS


@pytest.fixture
def run(run):
    """Run `tiny-llm plan`; returns (exit status, stdout, stderr)."""
    return functools.partial(run, "plan")


@pytest.fixture
def facts(run):
    def facts(*arguments):
        status, out, err = run(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return facts


def config_of(path, **changes):
    config = {**json.loads(Path(LLAMA).read_text()), **changes}
    path.write_text(json.dumps(config))
    return str(path)


def test_32_conversations_of_2k_tokens_on_llama_3_1_8b(facts):
    plan = facts(LLAMA, "--context", "2048", "--batch", "32")
    assert PARAMETERS == 8_030_261_248  # as published
    assert plan["parameters"] == PARAMETERS
    assert plan["weights"]["bytes"] == 2 * PARAMETERS
    kv = {entry["bits"]: entry for entry in plan["kv"]}
    assert [kv[b]["bytes_per_token"] for b in (16, 8, 4)] == [131072, 69632, 36864]
    for bits, gib in ((16, 8), (8, 4.25), (4, 2.25)):
        assert kv[bits]["bytes"] == {"dense": gib * GIB, "paged": gib * GIB}
        assert kv[bits]["bytes_with_weights"] == 2 * PARAMETERS + gib * GIB
    step = 32 * (2 * (LAYERS + HEAD) + 32 * 4 * 4096 * 2048)
    assert kv[16]["decode_flops"] == step
    # the look-up table is not read, the norms are
    moved = 2 * (LAYERS + HEAD + NORMS) + 32 * 131072 * 2049
    assert kv[16]["decode_bytes"] == moved
    assert kv[16]["decode_intensity"] == step / moved
    prompt = 2 * (2048 * LAYERS + HEAD) + 32 * 4 * 4096 * (2048 * 2049 // 2)
    assert kv[4]["prefill_flops"] == prompt


def test_a_device_tells_what_fits_and_how_fast(facts):
    plan = facts(LLAMA, "--batch", "32", "--device", "M4 Pro", "--memory", "24GB")
    (device,) = plan["devices"]
    assert device["memory_for_plan"] == plan["memory"] == 24 * GIB
    assert "Apple press release" in device["source"]
    first = device["plans"][0]
    assert [p["kv_bits"] for p in device["plans"]] == [16, 8, 4]
    assert first["fits"] is True
    left = 24 * GIB - 2 * PARAMETERS  # 9.04 GiB
    assert first["largest_batch"] == left // (GIB // 4) == 36
    assert first["largest_context"] == left // 131072 // 32 // 64 * 64 == 2304
    moved = plan["kv"][0]["decode_bytes"]
    assert first["decode_seconds"] == pytest.approx(moved / 273e9)
    assert first["decode_tokens_per_second"] == pytest.approx(32 * 273e9 / moved)
    assert first["decode_limit"] == "bandwidth"
    flops = plan["kv"][0]["prefill_flops"]
    assert first["prefill_seconds"] == pytest.approx(flops / (20 * 256 * 1.578e9))
    assert first["prefill_limit"] == "compute"


def test_without_memory_three_quarters_of_the_largest_count(facts):
    plan = facts(LLAMA, "--device", "M1")
    (device,) = plan["devices"]
    assert device["memory"] == 16 * GIB
    assert device["memory_for_plan"] == 12 * GIB
    assert {p["fits"] for p in device["plans"]} == {False}  # 15 GiB of weights
    assert {p["largest_batch"] for p in device["plans"]} == {0}
    asked = facts(LLAMA, "--memory", "200 GiB")["devices"][0]
    assert (asked["name"], asked["memory_for_plan"]) == ("M1", 16 * GIB)


@pytest.mark.parametrize(
    ("bits", "size"),
    [
        ("16", 2 * PARAMETERS),
        # every matrix in groups of 64: a scale and a bias of 2 bytes
        ("8", (PARAMETERS - NORMS) * 17 // 16 + 2 * NORMS),
        ("4", (PARAMETERS - NORMS) * 9 // 16 + 2 * NORMS),
    ],
)
def test_weight_bits_count_scales_too(facts, bits, size):
    plan = facts(LLAMA, "--weight-bits", bits)
    assert plan["weights"] == {"stored_as": f"{bits} bits", "bytes": size}
    read = size * HEAD // PARAMETERS  # about that much is the look-up table
    moved = plan["kv"][0]["decode_bytes"] - 131072 * 2049
    assert moved == pytest.approx(size - read, rel=1e-3)


def test_packed_weights_count_as_stored(facts, tmp_path):
    general = {"group_size": 64, "bits": 4}
    config = config_of(
        tmp_path / "config.json",
        quantization={
            **general,
            "lm_head": {"group_size": 32, "bits": 8},
            "model.embed_tokens": False,
            "model.layers.0.self_attn.q_proj": False,
        },
    )
    plan = facts(config)
    assert plan["weights"]["stored_as"] == "4 bits in groups of 64, as stored"
    dense = HEAD + 4096**2 + NORMS
    packed = (LAYERS - 4096**2) * 9 // 16 + HEAD * (32 + 4) // 32
    assert plan["weights"]["bytes"] == 2 * dense + packed


def test_tied_embeddings_are_the_head_and_are_read(facts, tmp_path):
    plan = facts(config_of(tmp_path / "config.json", tie_word_embeddings=True))
    assert plan["parameters"] == PARAMETERS - HEAD
    assert plan["weights"]["bytes"] == 2 * (PARAMETERS - HEAD)
    moved = plan["kv"][0]["decode_bytes"] - 131072 * 2049
    assert moved == 2 * (PARAMETERS - HEAD)


def test_a_windowed_model_has_a_rotating_layout(facts):
    # two layers with a window of 12; 2 KV heads of 16 numbers: 128 bytes a layer
    (kv,) = facts(WINDOWED, "--context", "500")["kv"]
    assert kv["bytes_per_token"] == 2 * 128
    assert kv["bytes"] == {
        "dense": 2 * 512 * 128,
        "paged": 2 * 3 * 64 * 128,  # 11 + 64 + 1 tokens: 2 pages and one begun
        "rotating": 2 * 512 * 128,  # 12 + 64 rounded up to 256, and 256
    }


def test_heads_that_cannot_be_packed_are_told(run, facts):
    plan = facts(WINDOWED)
    assert [kv["bits"] for kv in plan["kv"]] == [16]
    assert "a head of 16 numbers" in plan["not_packed"]
    assert "no 8 or 4 bits: a head of 16 numbers" in run(WINDOWED)[1]
    status, out, err = run(WINDOWED, "--kv-bits", "4")
    assert (status, out) == (1, "")
    assert "a head of 16 numbers cannot be packed" in err


def test_the_context_is_the_models_if_that_is_less(facts, run):
    assert facts(WINDOWED)["context"] == 512
    assert facts(LLAMA)["context"] == 2048
    status, out, err = run(WINDOWED, "--context", "513")
    assert (status, out) == (1, "")
    assert "--context is 513, but the model's context is 512" in err


def test_only_the_configuration_is_read(facts, tmp_path):
    shutil.copy(LLAMA, tmp_path / "config.json")
    of_folder, of_file = facts(str(tmp_path)), facts(LLAMA)
    for plan in (of_folder, of_file):
        del plan["model"]
    assert of_folder == of_file


def test_of_a_hub_repository_only_the_configuration_is_fetched(
    facts, tmp_path, monkeypatch
):
    asked = []

    def snapshot(repo, **options):
        asked.append((repo, options["revision"], options["allow_patterns"]))
        return str(tmp_path)

    shutil.copy(LLAMA, tmp_path / "config.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert facts("owner/name", "--revision", "v1")["parameters"] == PARAMETERS
    assert asked == [("owner/name", "v1", ["config.json"])]


@pytest.mark.smollm2
def test_a_gguf_file_counts_as_packed(facts, smollm2_gguf):
    plan = facts(str(smollm2_gguf))
    assert plan["parameters"] == 134_515_008
    table, norms = 49152 * 576, 61 * 576
    matrices = 134_515_008 - table - norms
    # Q4_1 layers and a Q8_0 table, in groups of 32 with a scale and a bias
    expected = matrices * 20 // 32 + table * 36 // 32 + 2 * norms
    assert plan["weights"]["bytes"] == expected
    assert plan["kv"][0]["bytes_per_token"] == 2 * 30 * 3 * 64 * 2


@pytest.mark.parametrize("extra", [(), ("--device", "M5"), ("--kv-bits", "4")])
def test_the_text_is_short_aligned_and_says_computed(run, extra):
    status, out, err = run(LLAMA, "--batch", "32", *extra)
    assert (status, err) == (0, "")
    assert "32 conversations of 2,048 tokens; all figures are computed" in out
    assert "8,030,261,248 parameters, 14.96 GiB (16 bits, as stored)" in out
    (row,) = [line.split() for line in out.splitlines() if " 36 KiB " in line]
    size = ["36", "KiB", "2.25", "GiB", "2.25", "GiB", "17.21", "GiB"]
    assert row == ["4", *size, "29.5", "1,958"]
    assert len(out.splitlines()) < 40
    table = out.split("\n\n")[1].splitlines()[1:]
    assert len({len(line) for line in table}) == 1
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_the_table_of_chips_fits_a_terminal(run):
    out = run(LLAMA, "--batch", "32")[1]
    lines = out.split("\n\n")[2].splitlines()
    assert sum(line.startswith("M") for line in lines) == 20
    assert max(map(len, lines)) <= 84
    (row,) = [line.split() for line in lines if line.startswith("M4 Pro")]
    # 48 GiB; 33.04 GiB left of it: 132 conversations of 0.25 GiB
    assert row[:6] == ["M4", "Pro", "48", "yes", "132", "8,448"]
    (row,) = [line.split() for line in lines if line.startswith("M1  ")]
    assert row[1:4] == ["12", "no", "0"]
    assert row[5:] == ["-"] * 4


def test_one_chip_has_a_row_for_each_cache_and_its_source(run):
    out = run(LLAMA, "--device", "apple m4 pro")[1]
    assert "M4 Pro: 273 GB/s, 8.08 TFLOP/s in float32; ridge point 29.6" in out
    assert "Apple press release, 2024-10-30" in out
    rows = [line.split()[0] for line in out.split("\n\n")[2].splitlines()]
    assert [first for first in rows if first in ("16", "8", "4")] == ["16", "8", "4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: MODEL"),
        ([LLAMA, "--batch", "0"], "'0' is not a whole number from 1"),
        ([LLAMA, "--context", "many"], "'many' is not a whole number"),
        ([LLAMA, "--kv-bits", "3"], "invalid choice: '3'"),
        ([LLAMA, "--weight-bits", "5"], "invalid choice: 5"),
        ([LLAMA, "--memory", "lots"], "'lots' is not a size such as 24GB"),
        ([LLAMA, "--memory", "0GB"], "'0GB' is not a size"),
        ([LLAMA, "--memory", "-1GB"], "memory"),
        ([LLAMA, "--memory", "24"], "'24' is not a size"),
        ([LLAMA, "--seed", "1"], "unknown arguments: --seed 1"),
    ],
)
def test_wrong_usage_exits_with_2(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * GIB), ("1.5 gib", 3 * GIB // 2), ("512M", GIB // 2), ("1TB", 2**40)],
)
def test_memory_is_read_as_people_write_it(facts, text, size):
    assert facts(LLAMA, "--memory", text)["memory"] == size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no model at 'nowhere'"),
        ([LLAMA, "--device", "M99"], "unknown device 'M99'; there are: M1, "),
        ([LLAMA, "--revision", "x"], "--revision has no meaning for the file"),
        (["owner/name:x.gguf"], "would be fetched whole"),
    ],
)
def test_errors_are_told_in_one_line(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"quantization": {"bits": 7, "group_size": 64}}, "bits=7"),
    ],
)
def test_a_configuration_that_cannot_be_loaded_is_refused(
    run, tmp_path, changes, words
):
    config = config_of(tmp_path / "config.json", **changes)
    status, out, err = run(config)
    assert (status, out) == (1, "")
    assert words in err
    assert config in err


def test_weight_bits_plan_another_copy_of_a_foreign_quantisation(facts, tmp_path):
    config = config_of(
        tmp_path / "config.json", quantization_config={"quant_method": "gptq"}
    )
    plan = facts(config, "--weight-bits", "16")
    assert plan["weights"]["bytes"] == 2 * PARAMETERS


def test_matrices_that_do_not_divide_into_groups_are_named(run, tmp_path):
    config = config_of(tmp_path / "config.json", intermediate_size=14340)
    status, _, err = run(config, "--weight-bits", "4")
    assert status == 1
    assert "model.layers.0.mlp.down_proj has 14340 inputs" in err


def test_more_memory_than_a_chip_is_sold_with_is_refused(run):
    status, _, err = run(LLAMA, "--device", "M1", "--memory", "2TB")
    assert status == 1
    assert "but the M1 is sold with 17179869184 at most" in err
