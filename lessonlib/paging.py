"""Paging the KV cache: what a reservation wastes, and the tables that say where a sequence's blocks lie.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023.
"""

import numpy as np

from lessonlib.checks import check_choice, check_count, check_lengths
from lessonlib.kv_cache import blocks

RESERVATIONS = ("maximum", "power of two", "oracle", "paged")


def share_in_use(
    prompt_lens: object, output_lens: object, policy: str, max_context: int = 2048, block_size: int = 16
) -> float:
    """Share of the reserved token slots that hold a token, averaged over the steps of all requests.

    Each request keeps its reservation from its first to its last new token: the model's longest context ("maximum"),
    its prompt and its output's length rounded up to a power of two, its exact length ("oracle", which nobody knows
    beforehand), or the blocks it has filled so far ("paged"). Gaps between reservations are not counted, so that
    contiguous memory is flattered. Raises ValueError for lists of unequal length, and requests that are empty or
    beyond `max_context`.
    """
    check_choice("policy", policy, RESERVATIONS)
    prompts, outputs = check_lengths("prompt_lens", prompt_lens), check_lengths("output_lens", output_lens)
    if prompts.shape != outputs.shape:
        raise ValueError(
            f"prompt_lens and output_lens must be lists of one length, got {prompts.size} and {outputs.size}"
        )
    final = prompts + outputs
    if final.max() > check_count("max_context", max_context):
        raise ValueError(f"max_context must be at least the longest request, {final.max()} tokens, got {max_context}")
    used = reserved = 0
    for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        held = np.arange(prompt + 1, prompt + output + 1)
        used += held.sum()
        if policy == "paged":
            reserved += blocks(held, block_size).sum() * block_size
        else:
            rounded_up = prompt + (1 << (output - 1).bit_length())
            sizes = {
                "maximum": max_context,
                "power of two": min(rounded_up, max_context),
                "oracle": prompt + output,
            }
            reserved += output * sizes[policy]
    return float(used / reserved)


class BlockTable:
    """Physical blocks of a paged cache, and for every sequence the list of those it uses, in order.

    Blocks are counted by how many sequences use them, so that sequences with a common beginning share its blocks.
    Raises ValueError for a sequence that does not exist (or already does), and MemoryError where no block is free;
    both change nothing.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = check_count("block_size", block_size)
        self.users = [0] * check_count("num_blocks", num_blocks)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return self.users.count(0)

    def append(self, name: str, num_tokens: int = 1) -> None:
        """Add tokens to a sequence (a new name starts one); blocks are taken as they are needed, wherever they lie.

        A last block that others use too is copied before it is written (copy on write).
        """
        tokens = self.lengths.get(name, 0) + check_count("num_tokens", num_tokens)
        table = self.tables.get(name, [])
        shared = bool(self.lengths.get(name, 0) % self.block_size and self.users[table[-1]] > 1)
        needed = blocks(tokens, self.block_size) - len(table) + shared
        free = [block for block, users in enumerate(self.users) if not users][:needed]
        if len(free) < needed:
            raise MemoryError(
                f"{name} needs {needed} block{'s' * (needed > 1)}, {len(free)} are free: let another sequence go first"
            )
        if shared:
            self.users[table.pop()] -= 1
        self.tables[name] = table + free
        self.lengths[name] = tokens
        for block in free:
            self.users[block] += 1

    def fork(self, name: str, new_name: str) -> None:
        """A second sequence that begins with all of the first: it takes no memory until one of them goes on."""
        self._check(name)
        if new_name in self.tables:
            raise ValueError(f"there is a sequence {new_name!r} already")
        self.tables[new_name], self.lengths[new_name] = list(self.tables[name]), self.lengths[name]
        for block in self.tables[name]:
            self.users[block] += 1

    def free(self, name: str) -> None:
        """Let a sequence go; blocks that no other one uses are free again."""
        self._check(name)
        for block in self.tables.pop(name):
            self.users[block] -= 1
        del self.lengths[name]

    def _check(self, name: str) -> None:
        if name not in self.tables:
            raise ValueError(f"no sequence {name!r}: there are {', '.join(self.tables) or 'none'}")
