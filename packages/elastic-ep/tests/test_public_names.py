"""The public names: adding or removing one is a decision."""

import elastic_ep

NAMES = """
Abort Aborted Action Address Apply Balancer Ballot Begun Boundary BusyError COORDINATOR Cancel
CancelPrepare Check Commit CommitAt CommitNow Committed Completed Coordinator Copy Counted
DeadlineError DensePull Device Died EMPTY EagerRunner ElasticError Event Exit Expired Fence
FencedError Fingerprint Finished Flag Flip Flipped Group GroupError Heard Hello Interrupt Keep Kill
Lane LaneError LaneShape Launch LaunchError Launcher Lease LeaseDue MESSAGES Member MemberAction
MemberEvent MemberPhase MemoryNetwork MemoryTransport Message Note OnLoss Op Operation OutdatedError
Overdue Patience PatienceError PeerLostError Phase Placement Plan PlanError Prepare PrepareEnded
PrepareFailed Prepared Programs Readied Reason Received Refused Reload Report RequestError Resume
Resumed Retire Retired RoutingTables Run Runner RunnerError Scale Seat Seen Send ServeError Service
Shape SizeError Span Stage StartPrepare StaticRunner Stepped Stopped Suspect Tell Tick Transport
TransportError UnfinishedError Unresponsive WireError act coordinate decode encode join nobody pack
place rebalance resize run_rank stages stale tables unpack wait wait_until
"""


def test_public_names_are_these() -> None:
    assert sorted(elastic_ep.__all__) == NAMES.split()
    assert all(hasattr(elastic_ep, name) for name in elastic_ep.__all__)
