"""Reads many randomly damaged copies of a model file; run as a program of its own.

    python fuzz_files.py safetensors|index|gguf FOLDER FIRST_SEED LAST_SEED

Prints how many were read and how many refused with a LoadError; anything else is a
traceback and a status that is not 0. It is a process of its own so that a crash of
the interpreter is a failed test and not the end of all tests.
"""

import json
import random
import shutil
import struct
import sys
from pathlib import Path

import mlx.core as mx
from broken import INDEX, sharded, single
from make_gguf import small_gguf

from tiny_llm.errors import LoadError
from tiny_llm.gguf_file import GGUFFile
from tiny_llm.weight_files import read_weights

NUMBERS = (0, 1, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


def damage(data, rng, header):
    """A copy of `data` with one to four faults, most of them in its header."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(header, len(data)) if rng.random() < 0.9 else len(data))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
            case 4:
                del data[at : at + rng.randint(1, 40)]
            case 5:
                source = rng.randrange(min(header, len(data)))
                data[at:at] = data[source : source + rng.randint(1, 40)]
        if len(data) < 2:
            break
    return bytes(data)


def swap_text(data, rng):
    """A copy of JSON text where one value is another one's, or nonsense."""
    tokens = (
        json.dumps(json.loads(data)).replace(":", " : ").replace(",", " , ").split()
    )
    nonsense = ["-1", "null", '"x"', "[]", "{}", "1e999", "[[]]", '"../x.safetensors"']
    at = rng.randrange(len(tokens))
    tokens[at] = rng.choice([rng.choice(tokens), rng.choice(nonsense)])
    return "".join(tokens).encode()


def read(path):
    """Read the model at `path` to the last byte."""
    if path.is_dir():
        mx.eval(read_weights(path))
    else:
        file = GGUFFile(path)
        file.config()
        mx.eval(file.weights(keep_quantized=True))
        mx.eval(file.weights(keep_quantized=False))


def main(kind, folder, first, last):
    if kind == "gguf":
        target = path = small_gguf(folder / "model.gguf")
        header = target.read_bytes().rindex(b"blk.1.") + 60
    elif kind == "safetensors":
        path = single(folder)
        target = path / "model.safetensors"
        header = 8 + struct.unpack("<Q", target.read_bytes()[:8])[0]
    else:
        path = sharded(folder)
        target = path / INDEX
        header = target.stat().st_size
    whole = target.read_bytes()
    good = bad = 0
    for seed in range(first, last):
        rng = random.Random(seed)
        if kind == "safetensors" and rng.random() < 0.5:
            text = swap_text(whole[8:header], rng)
            damaged = struct.pack("<Q", len(text)) + text + whole[header:]
        elif kind == "index" and rng.random() < 0.5:
            damaged = swap_text(whole, rng)
        else:
            damaged = damage(whole, rng, header)
        target.write_bytes(damaged)
        try:
            read(path)
            good += 1
        except LoadError as error:
            bad += 1
            if str(folder) not in str(error):
                raise SystemExit(f"seed {seed}: no file is named in {error}") from error
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
    shutil.rmtree(folder)
    print(json.dumps({"read": good, "refused": bad}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
