"""What one rank keeps, another reads: any bytes, shorter after longer, none at all."""

import pytest
from elastic_ep import MemoryNetwork, ServeError, wait
from elastic_ep.tuning import CAPACITY, LENGTH, Tuning
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.binary(max_size=100), min_size=1))
def test_what_is_kept_last_is_read(kept: list[bytes]) -> None:
    network = MemoryNetwork()
    here, there = network.end("here"), network.end("there")
    source, reader = Tuning(here), Tuning(there)
    peer = there.connect(here.card()).peer
    for found in kept:
        source.keep(found)
        wait(there, [there.read(peer, [LENGTH])], 5)
        if reader.contents():
            wait(there, [there.read(peer, reader.contents())], 5)
        assert reader.found == found


def test_too_much_is_refused() -> None:
    tuning = Tuning(MemoryNetwork().end("here"))
    tuning.keep(bytes(CAPACITY))
    with pytest.raises(ServeError, match="1048577 bytes of tuning results: more than 1048576"):
        tuning.keep(bytes(CAPACITY + 1))
    assert tuning.found == bytes(CAPACITY)
