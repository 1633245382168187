"""Generate text on Tenstorrent devices without a server.

    MESH_DEVICE=N150 python examples/offline_inference_tt.py --model meta-llama/Llama-3.1-8B-Instruct \\
        [--prompt TEXT ...] [--max-tokens N] [--temperature T] [any engine flag of vLLM]
"""

import argparse

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = (
    "The capital of France is",
    "A haiku about the sea:",
    "The first ten prime numbers are",
    "To boil an egg,",
)


def parse() -> argparse.Namespace:
    parser = FlexibleArgumentParser(description="Generate text on Tenstorrent devices without a server.")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="meta-llama/Llama-3.1-70B-Instruct", block_size=64, max_num_seqs=32)
    parser.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 picks the likeliest token")
    parsed: argparse.Namespace = parser.parse_args()
    return parsed


def main() -> None:
    arguments = parse()
    prompts = arguments.prompt or list(PROMPTS)
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(arguments))
    sampling = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    for output in llm.generate(prompts, sampling):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
