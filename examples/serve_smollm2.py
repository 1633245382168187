"""Serve SmolLM2-135M-Instruct on the host mesh: a real model through real vLLM, without hardware.

    python examples/serve_smollm2.py [any flag of `vllm serve`]

Prepares the model the first time, starts vLLM's OpenAI server on 127.0.0.1:8000 and prints a command to try
once it answers. Ctrl-C ends it.
"""

import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

from prepare_smollm2 import NAME, prepare

EXAMPLES = Path(__file__).resolve().parent
HOST, PORT = "127.0.0.1", "8000"
DEFAULTS = {
    "--host": HOST,
    "--port": PORT,
    "--served-model-name": NAME,
    "--max-model-len": "4096",
    "--max-num-seqs": "8",
}
TRY = """
It serves. Try, in another terminal:

  curl -s http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "temperature": 0,
    "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

Ctrl-C ends the server.
"""


def main(arguments: list[str]) -> int:
    model = prepare()
    given = {
        argument.split("=", 1)[0].replace("_", "-") for argument in arguments if argument.startswith("--")
    }
    defaults = [part for flag, value in DEFAULTS.items() if flag not in given for part in (flag, value)]
    environment = os.environ | {
        "MESH_DEVICE": os.environ.get("MESH_DEVICE", "host"),
        "EXTRA_MODELS_DIR": os.environ.get("EXTRA_MODELS_DIR", str(EXAMPLES / "models/torch-llama")),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *defaults, *arguments]
    server = subprocess.Popen(command, env=environment)
    # The terminal sends Ctrl-C to the server as well; it shuts down, and we wait for it.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    address = {"host": option(arguments, "--host", HOST), "port": option(arguments, "--port", PORT)}
    model_name = option(arguments, "--served-model-name", NAME)
    threading.Thread(target=announce, args=(server, address, model_name), daemon=True).start()
    code = server.wait()
    return 0 if code in (0, -signal.SIGINT, -signal.SIGTERM) else code


def option(arguments: list[str], flag: str, default: str) -> str:
    """The value given for `flag`, as `--flag value` or `--flag=value`."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            return value or arguments[index + 1]
    return default


def announce(server: "subprocess.Popen[bytes]", address: dict[str, str], model: str) -> None:
    """Print a command to try as soon as the server is healthy."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen("http://{host}:{port}/health".format(**address), timeout=1):
                print(TRY.format(model=model, **address), flush=True)
                return
        except (urllib.error.URLError, OSError):
            threading.Event().wait(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
