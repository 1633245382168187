"""How a server ends. By its name the last file here, since it ends the server that the others share."""

import time
from collections.abc import Iterator
from typing import Any

from openai import OpenAI

from .serving import MODEL, Server, tail
from .test_processes import ENDS_WITHIN_S, nothing_is_left_of
from .test_requests import PROMPTS


def stream(client: OpenAI, max_tokens: int) -> Iterator[Any]:
    """The choices of a streamed completion that does not end before `max_tokens`."""
    chunks = client.completions.create(
        model=MODEL,
        prompt=PROMPTS[2],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return (chunk.choices[0] for chunk in chunks)


def test_ctrl_c_ends_the_server_soon_and_delivers_what_was_generated(server: Server) -> None:
    """With a finished request, and with one in the middle of a generation that would take far longer."""
    with server.client() as client:
        finished = list(stream(client, 16))
        assert finished[-1].finish_reason == "length"
        unfinished = stream(client, 450)
        received = [next(unfinished) for _ in range(3)]
        server.press_ctrl_c()
        pressed = time.monotonic()
        received += unfinished
        code = server.process.wait(ENDS_WITHIN_S)
        assert time.monotonic() - pressed < ENDS_WITHIN_S
        assert code == 0, tail(server.log)
        assert nothing_is_left_of(server), tail(server.log)
        assert "force killing" not in server.log.read_text(), tail(server.log)
    whole, text = ("".join(choice.text for choice in choices) for choices in (finished, received))
    assert text.startswith(whole) or whole.startswith(text)
    assert received[-1].finish_reason == "abort"
