"""What reservations waste, and tables of blocks that never lose or share one by mistake."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lessonlib.kv_cache import blocks
from lessonlib.paging import RESERVATIONS, BlockTable, share_in_use

RNG = np.random.default_rng(0)
PROMPTS, OUTPUTS = RNG.integers(10, 400, 200), RNG.integers(5, 600, 200)


def test_shares_of_one_request_by_hand():
    # 3 prompt tokens and 3 new ones: 4, 5 and then 6 tokens held
    expected = {"maximum": 15 / 96, "power of two": 15 / (3 * (3 + 4)), "oracle": 15 / 18, "paged": 15 / (4 + 8 + 8)}
    for policy, share in expected.items():
        assert share_in_use([3], [3], policy, max_context=32, block_size=4) == pytest.approx(share)


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=8))
def test_the_order_of_reservations(requests):
    prompts, outputs = zip(*requests, strict=True)
    shares = [share_in_use(prompts, outputs, policy) for policy in RESERVATIONS[:3]]
    assert 0 < shares[0] <= shares[1] <= shares[2] <= 1
    assert share_in_use(prompts, outputs, "paged", block_size=1) == 1


def test_reservations_are_refused_clearly():
    with pytest.raises(ValueError, match="one length"):
        share_in_use([1, 2], [1], "paged")
    with pytest.raises(ValueError, match="max_context must be at least the longest request, 3000 tokens, got 2048"):
        share_in_use([2000], [1000], "maximum")
    with pytest.raises(ValueError, match="policy must be one of maximum, power of two, oracle, paged"):
        share_in_use([1], [1], "buddy")
    with pytest.raises(ValueError, match="output_lens"):
        share_in_use([1], [0], "paged")


def check(table: BlockTable) -> None:
    uses = [block for used in table.tables.values() for block in used]
    assert [uses.count(block) for block in range(len(table.users))] == table.users
    for name, used in table.tables.items():
        assert len(set(used)) == len(used) == blocks(table.lengths[name], table.block_size)
    for block in range(len(table.users)):  # a block that several use is full, or the same last one of equal sequences
        owners = [name for name, used in table.tables.items() if block in used]
        positions = {table.tables[name].index(block) for name in owners}
        assert len(positions) <= 1


ACTIONS = st.tuples(
    st.sampled_from(["append", "fork", "free"]), st.integers(0, 3), st.integers(0, 3), st.integers(1, 9)
)


@given(st.lists(ACTIONS, max_size=40), st.integers(1, 5))
def test_no_block_is_lost_or_written_by_two(actions, block_size):
    table = BlockTable(12, block_size)
    content: dict[str, list[tuple[str, int]]] = {}
    memory: dict[tuple[int, int], tuple[str, int]] = {}
    for stamp, (action, one, other, tokens) in enumerate(actions):
        name, second = f"r{one}", f"r{other}"
        before = (dict(table.tables), dict(table.lengths), list(table.users))
        try:
            if action == "append":
                old = list(table.tables.get(name, []))
                table.append(name, tokens)
                start = len(content.get(name, []))
                new = [(name, stamp * 100 + i) for i in range(tokens)]
                content[name] = content.get(name, []) + new
                if old and table.tables[name][: len(old)] != old:  # copied on write
                    for slot in range(block_size):
                        source = memory.get((old[-1], slot))
                        if source:
                            memory[table.tables[name][len(old) - 1], slot] = source
                for i, value in enumerate(new, start):
                    memory[table.tables[name][i // block_size], i % block_size] = value
            elif action == "fork":
                table.fork(name, second)
                content[second] = list(content[name])
            else:
                table.free(name)
                del content[name]
        except (ValueError, MemoryError):
            assert (table.tables, table.lengths, table.users) == before
        check(table)
        for name, tokens_of in content.items():  # every sequence still reads what it wrote
            read = [memory[table.tables[name][i // block_size], i % block_size] for i in range(len(tokens_of))]
            assert read == tokens_of


def test_sharing_a_prefix_stores_it_once():
    table = BlockTable(20, 16)
    table.append("system prompt", 64)
    for user in "abc":
        table.fork("system prompt", user)
        table.append(user, 10)
    assert 20 - table.num_free == 4 + 3  # 64 shared tokens, 3 x 10 of their own
    table.free("system prompt")
    assert 20 - table.num_free == 7
    table.free("a")
    assert 20 - table.num_free == 6


def test_a_full_pool_says_who_needs_what():
    table = BlockTable(2, 4)
    table.append("a", 5)
    with pytest.raises(MemoryError, match="b needs 1 block, 0 are free"):
        table.append("b")
    with pytest.raises(ValueError, match="no sequence 'c': there are a"):
        table.free("c")
    with pytest.raises(ValueError, match="already"):
        table.fork("a", "a")
    with pytest.raises(ValueError, match="num_tokens"):
        table.append("a", 0)
