"""Who serves whom, for any sets of holders and needers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from verl_mg.reshard.routing import BoxRouting

ranks = st.sets(st.integers(0, 15), min_size=1, max_size=12).map(lambda found: tuple(sorted(found)))


@given(ranks, ranks, st.sampled_from([1, 2, 4, 16]), st.integers(0, 10**6))
def test_box_routing_senders_and_receivers_agree_and_box_enters_node_once(holders, needers, node, turn):
    relation = BoxRouting(holders, needers, node)
    received = {}
    for rank in needers:
        source = relation.source_of(rank, turn)
        assert (source == rank) == (rank in holders)
        if source != rank:
            received[rank] = (source, relation.forwarded(rank, turn))
    sent = {}
    for rank in holders:
        sent |= {peer: (rank, False) for peer in relation.send_targets(rank, turn)}
    for rank in received:
        sent |= {peer: (rank, True) for peer in relation.forward_targets(rank, turn)}
    assert sent == received
    entering = Counter(rank // node for rank, (source, _) in received.items() if rank // node != source // node)
    homes = {rank // node for rank in holders}
    assert set(entering) == {rank // node for rank in received} - homes
    assert set(entering.values()) <= {1}
    for source, forwarded in received.values():
        # Whoever passes a box on has it from elsewhere, and holds it as a target.
        assert forwarded == (source not in holders)
        assert not forwarded or (source in needers and not received[source][1])


@given(ranks, ranks, st.sampled_from([2, 4, 16]))
def test_box_routing_over_many_boxes_balances_ranks(holders, needers, node):
    relation, turns = BoxRouting(holders, needers, node), range(3, 3 + 7 * 3000, 7)
    sent: Counter[int] = Counter()
    entered: Counter[int] = Counter()
    for turn in turns:
        for rank in needers:
            source = relation.source_of(rank, turn)
            if source != rank:
                sent[source] += 1
                entered[rank] += source // node != rank // node
    shares: Counter[int] = Counter()
    for rank, share in relation.send_counts():
        shares[rank] += share
    for rank in range(16):
        assert abs(sent[rank] / len(turns) - shares[rank]) < 0.02
    for rank, once, entering in relation.receive_counts():
        assert once == 1.0 and abs(entered[rank] / len(turns) - entering) < 0.02
