"""Tables of a placement: fixed width, exact contents, one address for life."""

import torch
from elastic_ep import RoutingTables, Shape, place, resize, tables

SHAPE = Shape(layers=2, experts=6, slots=4, max_ranks=5)


def test_tables_name_every_replica_and_nothing_else() -> None:
    placement = place(SHAPE, [1, 4], [[9.0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 9.0]])
    made = tables(placement)
    assert made.slots.shape == (2, 6, 5)
    assert made.active.tolist() == [False, True, False, False, True]
    for layer in range(2):
        for expert in range(6):
            count = int(made.replicas[layer, expert])
            ids = made.slots[layer, expert].tolist()
            assert ids[count:] == [-1] * (5 - count)
            assert ids[:count] == [i for i, held in enumerate(placement.table[layer]) if held == expert]
    assert int(made.replicas.sum()) == 2 * 2 * 4


def test_lost_experts_have_no_replica() -> None:
    placement = place(SHAPE, [0, 1]).without({0})
    made = tables(placement)
    assert [(layer, e) for layer in range(2) for e in range(6) if made.replicas[layer, e] == 0] == list(
        placement.missing()
    )
    assert len(placement.missing()) == 4


def test_a_commit_changes_contents_and_no_address() -> None:
    old = place(SHAPE, [0, 1])
    serving = RoutingTables(SHAPE)
    serving.write(tables(old))
    addresses = [t.data_ptr() for t in (serving.slots, serving.replicas, serving.active)]
    grown = tables(resize(old, [0, 1, 3]).after)
    serving.write(grown)
    assert torch.equal(serving.slots, grown.slots)
    assert torch.equal(serving.replicas, grown.replicas)
    assert serving.active.tolist() == [True, True, False, True, False]
    assert [t.data_ptr() for t in (serving.slots, serving.replicas, serving.active)] == addresses
