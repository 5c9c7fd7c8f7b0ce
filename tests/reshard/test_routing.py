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
        source, forwarded = routes.source_of(rank)
        assert (source == rank) == (rank in holders)
        if source != rank:
            received[rank] = (source, forwarded)
    sent = {
        peer: (sender, sender not in holders) for sender in {*holders, *needers} for peer in routes.receivers_of(sender)
    }
    assert sent == received
    entering = Counter(rank // node for rank, (source, _) in received.items() if rank // node != source // node)
    homes = {rank // node for rank in holders}
    assert set(entering) == {rank // node for rank in received} - homes
    assert set(entering.values()) <= {1}
    for source, forwarded in received.values():
        # Whoever passes a box on has it from elsewhere, and holds it as a target.
        assert forwarded == (source not in holders)
        assert not forwarded or (source in needers and not received[source][1])


def served_one_by_one(holders: tuple[int, ...], needers: tuple[int, ...], node: int, turn: int) -> dict[int, int]:
    """Who serves each rank that lacks a box, found rank by rank as `BoxRouting` describes it."""

    def whose_turn(count: int) -> int:
        return (turn * 0x9E3779B9 % 2**32) * count // 2**32

    sources, remote_before = {}, 0
    for place in range(16):
        lacking = [rank for rank in needers if rank // node == place and rank not in holders]
        local = [rank for rank in holders if rank // node == place]
        if not lacking:
            continue
        if local:
            for number, rank in enumerate(lacking):
                sources[rank] = local[(whose_turn(len(local)) + number) % len(local)]
            continue
        first = remote_before + needers[0] // node + needers[0] % node
        remote_before += 1
        rails = sorted({rank % node for rank in holders})
        gateways = []
        for rank in lacking:
            same_rail = [holder for holder in holders if holder % node == rank % node]
            gateways += [(rank, same_rail[first % len(same_rail)])] if same_rail else []
        if not gateways:
            gateways = [
                (lacking[(rails[0] + number) % len(lacking)], holders[(first + number) % len(holders)])
                for number in range(min(len(rails), len(lacking)))
            ]
        gateway, holder = gateways[whose_turn(len(gateways))]
        sources |= dict.fromkeys(lacking, gateway) | {gateway: holder}
    return sources


@given(ranks, ranks, st.sampled_from([1, 2, 4, 16]), st.integers(0, 10**6))
def test_box_routing_of_random_ranks_is_that_found_rank_by_rank(holders, needers, node, turn):
    routes = BoxRouting(holders, needers, node).routes(turn)
    found = {rank: routes.source_of(rank)[0] for rank in needers if rank not in holders}
    assert found == served_one_by_one(holders, needers, node, turn)
    pairs = [*routes.direct_pairs.tolist(), *routes.forwarded_pairs.tolist()]
    assert sorted(pairs) == sorted([source, rank] for rank, source in found.items())


@given(ranks, ranks, st.sampled_from([2, 4, 16]))
def test_box_routing_over_many_boxes_balances_ranks(holders, needers, node):
    relation, turns = BoxRouting(holders, needers, node), range(3, 3 + 7 * 3000, 7)
    sent: Counter[int] = Counter()
    entered: Counter[int] = Counter()
    for turn in turns:
        for rank in needers:
            source, _ = relation.routes(turn).source_of(rank)
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
    sources = {rank: {relation.routes(turn).source_of(rank)[0] for turn in range(100)} for rank in needers}
    for rank, found in sources.items():
        assert len({source for source in found if source // node != rank // node}) <= 1


def test_box_routing_between_nodes_uses_all_network_adapters_and_holders():
    # Tensor parallel 4 on nodes 0 and 1, where each box is on two ranks of a node; nodes 2 to 5 need the whole model.
    everyone = tuple(range(16, 48))
    for box in range(4):
        holders = (box, box + 4, box + 8, box + 12)
        relation = BoxRouting(holders, everyone, 8)
        direct = {tuple(pair) for turn in range(100) for pair in relation.routes(turn).direct_pairs.tolist()}
        assert {gateway % 8 for _, gateway in direct} == {box, box + 4}
        assert Counter(holder for holder, _ in direct) == dict.fromkeys(holders, 2)
        assert all(gateway % 8 == holder % 8 for holder, gateway in direct)


def test_box_routing_boxes_of_the_same_holders_start_at_different_holders():
    # Tensor parallel 8 on nodes 0 to 3; an engine on nodes 4 to 7 needs each quarter of box 0 on another rank.
    first = [BoxRouting((0, 8, 16, 24), (rank,), 8).routes(0).source_of(rank)[0] for rank in (52, 53, 54, 55)]
    assert sorted(first) == [0, 8, 16, 24]
