import elastic_ep


def test_public_names_are_these() -> None:
    assert sorted(elastic_ep.__all__) == [
        "Copy",
        "DeadlineError",
        "DensePull",
        "EMPTY",
        "ElasticError",
        "FencedError",
        "LaneError",
        "PeerLostError",
        "Placement",
        "Plan",
        "PlanError",
        "Reload",
        "RoutingTables",
        "RunnerError",
        "Shape",
        "SizeError",
        "Stage",
        "TransportError",
        "WireError",
        "nobody",
        "place",
        "rebalance",
        "resize",
        "stages",
        "tables",
    ]
    assert all(hasattr(elastic_ep, name) for name in elastic_ep.__all__)
