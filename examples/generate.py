"""Text from a prompt, in the two ways to call the engine.

`stream_text` takes a text or chat messages and yields pieces of text; `stream_generate`
takes token ids and yields token ids. The second is what the first is made of.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tiny_llm import load, stream_generate, stream_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="few tokens")
    args = parser.parse_args(argv)
    new_tokens = 12 if args.quick else 200

    model, tokenizer = load(args.model)

    print(f"Text level: {args.prompt}\n")
    messages = [{"role": "user", "content": args.prompt}]
    stream = stream_text(model, tokenizer, messages, max_new_tokens=new_tokens)
    for piece in stream:
        print(piece, end="", flush=True)
    result = stream.result
    print(
        f"\n\n{result.prompt_tokens} prompt tokens at "
        f"{result.prompt_tokens_per_second:.0f}/s, {len(result.token_ids)} new ones at "
        f"{result.decode_tokens_per_second:.0f}/s; it ended by {result.finish_reason!r}"
    )

    print("\nToken level, greedy, the first eight:\n")
    ids = tokenizer.encode_chat(messages)
    tokens = list(
        stream_generate(
            model, ids, max_new_tokens=8, eos_token_ids=tokenizer.eos_token_ids
        )
    )
    for token in tokens:
        text = tokenizer.decode([token], skip_special_tokens=False)
        print(f"{token:6d}  {text!r}")

    same = tokens == result.token_ids[: len(tokens)]
    print(f"\nthe same tokens at both levels: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
