"""Serve a model on Tenstorrent devices through vLLM's OpenAI server.

    MESH_DEVICE=T3K python examples/server_example_tt.py [any flag of `vllm serve`]

Without flags: meta-llama/Llama-3.1-70B-Instruct, blocks of 64 tokens, 32 sequences.
"""

import sys

from vllm.entrypoints.cli.main import main

DEFAULTS = {
    "--model": "meta-llama/Llama-3.1-70B-Instruct",
    "--block-size": "64",
    "--max-num-seqs": "32",
}


def with_defaults(arguments: list[str]) -> list[str]:
    """`arguments`, and the defaults for the flags that are not among them. A model may come by position."""
    given = {
        argument.split("=", 1)[0].replace("_", "-") for argument in arguments if argument.startswith("--")
    }
    if arguments and not arguments[0].startswith("-"):
        given.add("--model")
    missing = [part for flag, value in DEFAULTS.items() if flag not in given for part in (flag, value)]
    return [*arguments, *missing]


if __name__ == "__main__":
    # vLLM starts its processes by importing this file again, so nothing may run outside this guard.
    sys.argv = [sys.argv[0], "serve", *with_defaults(sys.argv[1:])]
    main()
