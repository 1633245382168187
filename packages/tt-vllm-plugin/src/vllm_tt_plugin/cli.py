"""The command ``tt-vllm``."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence

from vllm_tt_plugin.doctor import diagnose, gather
from vllm_tt_plugin.doctor.report import as_json, as_text, serves


def main() -> int:
    """Run by the console script."""
    return run(sys.argv[1:], os.environ)


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `tt-vllm ARGUMENTS`; gives the exit status: 1 where nothing would be served."""
    options = _parser().parse_args(arguments)
    facts = gather(environ, options.additional_config)
    findings = diagnose(facts)
    print(as_json(facts, findings) if options.json else as_text(findings))
    return 0 if serves(findings) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tt-vllm", description="Serving on Tenstorrent devices with vLLM.")
    doctor = parser.add_subparsers(dest="command", required=True).add_parser(
        "doctor",
        help="tell what would happen if a server were started here, and how to mend what is wrong",
        description="Exit status 0: a server would start; 1: it would not.",
    )
    doctor.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    doctor.add_argument(
        "--additional-config",
        metavar="JSON",
        type=json.loads,
        help='what `vllm serve` will be given, such as \'{"tt": {"fabric_config": "FABRIC_1D"}}\'',
    )
    return parser
