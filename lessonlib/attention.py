"""Attention in numpy: plain, with a cache, and in tiles that never hold the whole score matrix (FlashAttention).

Shapes in comments: L new tokens (queries), S tokens attended to, D head size; one head.
Source of the tiles: Dao et al., "FlashAttention", 2022; of the running softmax: Milakov and Gimelshein, 2018.
"""

import numpy as np

from lessonlib.checks import check_count

VALUE_BYTES = 2  # activations are kept in 16 bits


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; the largest score is taken off first, so that nothing overflows."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of one head: the L queries (L, D) are the last of the S tokens of k and v (S, D); -> (L, D).

    Raises ValueError for shapes that do not fit together, and for more queries than keys.
    """
    _check_shapes(q, k, v)
    scores = q @ k.T / np.sqrt(q.shape[-1])  # (L, S)
    future = np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]
    return softmax(np.where(future, -np.inf, scores)) @ v


def flash_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int = 64) -> np.ndarray:
    """The same result from tiles of `tile` x `tile` scores, with a softmax that is corrected as it goes; -> (L, D).

    For each query it keeps the largest score so far, the sum of weights and the weighted values; when a larger score
    turns up, what was summed before is scaled down. Raises ValueError as `attention` does, and for a tile below 1.
    """
    _check_shapes(q, k, v)
    check_count("tile", tile)
    out, before = np.empty((len(q), v.shape[1])), len(k) - len(q)
    for row in range(0, len(q), tile):
        queries = q[row : row + tile]
        positions = before + np.arange(row, row + len(queries))[:, None]
        largest = np.full((len(queries), 1), -np.inf)
        total, summed = np.zeros((len(queries), 1)), np.zeros((len(queries), v.shape[1]))
        for column in range(0, int(positions[-1, 0]) + 1, tile):  # tiles that lie wholly in the future are left out
            scores = queries @ k[column : column + tile].T / np.sqrt(q.shape[-1])
            future = np.arange(column, column + scores.shape[1]) > positions
            scores = np.where(future, -np.inf, scores)
            new_largest = np.maximum(largest, scores.max(axis=1, keepdims=True))
            shrink, weights = np.exp(largest - new_largest), np.exp(scores - new_largest)
            total = total * shrink + weights.sum(axis=1, keepdims=True)
            summed = summed * shrink + weights @ v[column : column + tile]
            largest = new_largest
        out[row : row + tile] = summed / total
    return out


def plain_traffic_bytes(context_len: int, num_heads: int, head_dim: int) -> float:
    """Bytes that plain attention over a prompt moves in one layer, in 16 bits.

    Query, key, value and output once; scores and weights, context_len^2 per head each, are written and read back.
    (The masked half is computed too.)
    """
    tokens, heads = check_count("context_len", context_len), check_count("num_heads", num_heads)
    return VALUE_BYTES * heads * (4.0 * tokens * check_count("head_dim", head_dim) + 4.0 * tokens**2)


def flash_traffic_bytes(context_len: int, num_heads: int, head_dim: int, tile: int = 128) -> float:
    """Bytes that tiled attention over a prompt moves in one layer, in 16 bits.

    Query and output once; keys and values once for every tile of queries. No scores: they stay on the chip. (That
    causal tiles in the future are skipped, which halves the reads, is left out.)
    """
    tokens, heads = check_count("context_len", context_len), check_count("num_heads", num_heads)
    passes = -(-tokens // check_count("tile", tile))
    return VALUE_BYTES * heads * (2.0 + 2.0 * passes) * tokens * check_count("head_dim", head_dim)


def _check_shapes(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    if not (q.ndim == k.ndim == v.ndim == 2 and q.shape[1] == k.shape[1] and 1 <= len(q) <= len(k) == len(v)):
        raise ValueError(
            f"q, k and v must be (L, D), (S, D) and (S, any) with L of 1 to S, got {q.shape}, {k.shape} and {v.shape}"
        )
