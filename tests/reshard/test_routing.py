"""Who serves whom, for any sets of holders and needers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from verl_mg.reshard.routing import BoxRouting

ranks = st.sets(st.integers(0, 15), min_size=1, max_size=12).map(lambda found: tuple(sorted(found)))


@given(ranks, ranks, st.sampled_from([1, 2, 4, 16]), st.integers(0, 10**6))
def test_box_routing_senders_and_receivers_agree_and_box_enters_node_once(holders, needers, node, turn):
    routes = BoxRouting(holders, needers, node).routes(turn)
    received = {}
    for rank in needers:
        source = routes.source_of(rank)
        assert (source == rank) == (rank in holders)
        if source != rank:
            received[rank] = (source, rank in routes.forwarded)
    sent = {}
    for sender, peers in routes.direct_receivers.items():
        sent |= {peer: (sender, False) for peer in peers}
    for sender, peers in routes.forwarded_receivers.items():
        sent |= {peer: (sender, True) for peer in peers}
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
            source = relation.routes(turn).source_of(rank)
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


@given(ranks, ranks, st.sampled_from([2, 4, 16]))
def test_box_routing_rank_receives_from_one_rank_of_other_nodes(holders, needers, node):
    relation = BoxRouting(holders, needers, node)
    sources = {rank: {relation.routes(turn).source_of(rank) for turn in range(100)} for rank in needers}
    for rank, found in sources.items():
        assert len({source for source in found if source // node != rank // node}) <= 1


def test_box_routing_between_nodes_uses_all_network_adapters_and_holders():
    # Tensor parallel 4 on nodes 0 and 1, where each box is on two ranks of a node; nodes 2 to 5 need the whole model.
    everyone = tuple(range(16, 48))
    for box in range(4):
        holders = (box, box + 4, box + 8, box + 12)
        relation = BoxRouting(holders, everyone, 8)
        direct = {pair for turn in range(100) for pair in relation.routes(turn).direct.items()}
        assert {gateway % 8 for gateway, _ in direct} == {box, box + 4}
        assert Counter(holder for _, holder in direct) == dict.fromkeys(holders, 2)
        assert all(gateway % 8 == holder % 8 for gateway, holder in direct)


def test_box_routing_boxes_of_the_same_holders_start_at_different_holders():
    # Tensor parallel 8 on nodes 0 to 3; an engine on nodes 4 to 7 needs each quarter of box 0 on another rank.
    first = [BoxRouting((0, 8, 16, 24), (rank,), 8).routes(0).direct[rank] for rank in (52, 53, 54, 55)]
    assert sorted(first) == [0, 8, 16, 24]
