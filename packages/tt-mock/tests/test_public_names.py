import tt_mock


def test_public_names_are_these() -> None:
    assert tt_mock.__all__ == [
        "CLUSTERS",
        "Calls",
        "ChildError",
        "Cluster",
        "ClusterError",
        "MockClusters",
        "TTMockError",
        "TraceError",
        "Traced",
        "ValuesError",
    ]
    assert all(hasattr(tt_mock, name) for name in tt_mock.__all__)


def test_what_is_not_there_is_no_attribute() -> None:
    assert not hasattr(tt_mock, "Shadows")
