"""Beam search: several likely answers at once, each with its score.

Greedy decoding takes the likeliest token at each step, which need not lead to the
likeliest text. Beam search keeps the best few texts instead. They are the rows of one
batch, and share the pages of what they have in common.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tiny_llm import load, stream_generate
from tiny_llm.beam import beam_search

QUESTION = "Name the three primary colours."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="short answers")
    args = parser.parse_args(argv)
    most = 12 if args.quick else 60

    model, tokenizer = load(args.model)
    ids = tokenizer.encode_chat([{"role": "user", "content": args.question}])
    eos = tokenizer.eos_token_ids

    print(f"{args.question}\n\nThe best {args.beams} beams:")
    beams = beam_search(
        model,
        ids,
        num_beams=args.beams,
        num_return_sequences=args.beams,
        max_new_tokens=most,
        eos_token_ids=eos,
    )
    for beam in beams:
        end = "" if beam.finished else " …"
        print(f"{beam.score:8.3f}  {tokenizer.decode(beam.token_ids)!r}{end}")

    greedy = list(stream_generate(model, ids, max_new_tokens=most, eos_token_ids=eos))
    (one,) = beam_search(
        model, ids, num_beams=1, max_new_tokens=most, eos_token_ids=eos
    )
    print(f"\nGreedy:\n{one.score:8.3f}  {tokenizer.decode(greedy)!r}")
    same = one.token_ids == greedy
    print(f"\none beam is greedy decoding: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
