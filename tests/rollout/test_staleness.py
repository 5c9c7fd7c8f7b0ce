"""The bound of staleness, over random timings of engines that are simulated token by token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.data.prompts import Prompt
from verl_mg.rollout.staleness import OutstandingGroups, PolicyVersions


class Engine:
    """Has slots; a sample takes its length in ticks, and notes the version of each of its tokens."""

    def __init__(self, slots, lengths):
        self.slots, self._lengths = slots, lengths
        self.queue, self.running, self.completed = [], {}, {}

    def tick(self, version):
        while self.queue and len(self.running) < self.slots:
            self.running[self.queue.pop(0)] = []
        for sample, versions in list(self.running.items()):
            versions.append(version)
            if len(versions) >= self._lengths(sample):
                self.completed[sample] = self.running.pop(sample)


def prompt(number):
    return Prompt(number, (1,), "", "", {}, "")


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["continue", "drop"]))
def test_tokens_that_are_trained_are_never_older_than_the_bound(data, bound, batch, group_size, stale):
    draw = data.draw(st.randoms(use_true_random=False))
    longest = data.draw(st.sampled_from([1, 4, 40]))
    lengths: dict[int, int] = {}
    engine = Engine(draw.randint(1, 8), lambda i: lengths.setdefault(i, draw.randint(1, longest)))
    versions = PolicyVersions(bound)
    groups = OutstandingGroups(versions, stale)
    versions.push(0)
    prompts = iter(range(10**6))
    returned_ids: set[int] = set()

    def admit(count):
        for group in groups.admit([prompt(next(prompts)) for _ in range(count)], group_size):
            engine.queue += group.ids

    def drop(dropped):
        for group in dropped:
            for i in group.ids:
                engine.completed.pop(i, None), engine.running.pop(i, None)
                engine.queue = [waiting for waiting in engine.queue if waiting != i]
        admit(len(dropped))

    admit(batch)
    for version in range(12):
        groups.adapt(engine.completed, batch)
        admit(batch + groups.num_ahead(batch) - len(groups.groups))
        returned = []
        while len(returned) < batch:
            selection = groups.select({i: min(v) for i, v in engine.completed.items()}, batch - len(returned))
            drop(selection.dropped)
            returned += selection.returned
            engine.tick(version)
        assert len(groups.groups) <= bound * batch + len(returned)
        for group in returned:
            written = {i: engine.completed.pop(i) for i in group.ids}
            assert not returned_ids & written.keys()
            returned_ids |= written.keys()
            tokens = [v for sample in written.values() for v in sample]
            trained = [v for v in tokens if v >= versions.oldest_allowed]
            assert all(versions.age(v) == version - v <= bound for v in trained)
            if len(set(tokens)) == 1 or stale == "drop":  # the order of the buffer makes no group too old
                assert trained == tokens
        for _ in range(draw.randint(0, 12)):
            engine.tick(version)
        versions.push(version + 1)
        drop(groups.drop_unfinished((i, min(v)) for i, v in engine.running.items() if v))


def test_outstanding_groups_follow_the_need_of_training():
    groups = OutstandingGroups(PolicyVersions(4, [0]), "continue")
    wanted = []
    for num_complete in (0, 0, 0, 3, 4, 4, 9, 2):
        groups.groups = {group.ids.start: group for group in groups.admit([prompt(0)] * num_complete, 1)}
        groups.adapt(set(groups.groups), 2)
        wanted.append(groups.num_ahead(2))
    assert wanted == [4, 6, 8, 7, 5, 3, 2, 2]
