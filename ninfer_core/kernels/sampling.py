"""Sampling: random numbers, logit processing, the draw and draft acceptance (contracts and torch twins).

R = rows of one sequence in a call (an anchor and its drafts), V = vocabulary rows, A = addressable ids (A <= V).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5
"""Below this a temperature is greedy: dividing by less overflows fp32."""

_M32 = 0xFFFFFFFF
_KEYS = [(i * 0x9E3779B9 & _M32, i * 0xBB67AE85 & _M32) for i in range(10)]
_SCALE = np.float32(4.6566127342e-10)
_WIDTHS = (256, 4096)


class Law(Protocol):
    """The sampling parameters of a request. `top_k` 0 is off; `logit_bias` pairs are (id, addend)."""

    @property
    def temperature(self) -> float: ...  # noqa: D102

    @property
    def top_p(self) -> float: ...  # noqa: D102

    @property
    def top_k(self) -> int: ...  # noqa: D102

    @property
    def min_p(self) -> float: ...  # noqa: D102

    @property
    def presence_penalty(self) -> float: ...  # noqa: D102

    @property
    def frequency_penalty(self) -> float: ...  # noqa: D102

    @property
    def repetition_penalty(self) -> float: ...  # noqa: D102

    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...  # noqa: D102


def uniform(seed: int, index: int) -> float:
    """The random number of one output position.

    Math: word 0 of Philox 4x32-10 with key `seed` (64 bits, low word first) and counter (index, 0, 0, 0), as a signed
    integer x, folded to max(x, -x-1) and scaled to [0, 1) in fp32. These are the bits of Triton's `rand(seed, index)`.
    Domain: 0 <= seed < 2**64, 0 <= index < 2**31.
    """
    c0, c1, c2, c3 = index & _M32, 0, 0, 0
    low, high = seed & _M32, seed >> 32 & _M32
    for ka, kb in _KEYS:
        p, q = 0xCD9E8D57 * c2, 0xD2511F53 * c0
        c0 = p >> 32 ^ c1 ^ (low + ka & _M32)
        c2 = q >> 32 ^ c3 ^ (high + kb & _M32)
        c1, c3 = p & _M32, q & _M32
    folded = c0 if c0 < 0x80000000 else _M32 - c0
    return float(np.float32(folded) * _SCALE)


def process(
    logits: Tensor, law: Law, counts: Tensor | None = None, seen: Tensor | None = None, drafts: Sequence[int] = ()
) -> Tensor:
    """Bias and penalties of the rows of one sequence.

    Math: z = logits + bias; where a token occurs in the prompt or the output, z = z / r if z > 0 else z * r with the
        repetition penalty r; then z -= frequency * count + presence * (count > 0), count over the output alone.
        Row i sees the first i drafts as output.
    Shapes: logits [R, A] fp32 (already cut to addressable ids), counts [A] int32, seen [A] bool (prompt tokens),
        at least R - 1 drafts.
    Domain: counts and seen are needed where the law has penalties.
    Numeric: fp32, in the order written.
    Effects: none; returns a new tensor, or `logits` itself where the law changes nothing.
    """
    penalized = law.presence_penalty or law.frequency_penalty or law.repetition_penalty != 1.0
    if not penalized and not law.logit_bias:
        return logits
    z = logits.clone()
    if law.logit_bias:
        ids, values = zip(*law.logit_bias, strict=True)
        z[:, list(ids)] += torch.tensor(values, dtype=z.dtype, device=z.device)
    if not penalized:
        return z
    if counts is None or seen is None:
        raise ValueError("a law with penalties needs the counts and the prompt's tokens")
    counts = counts.clone()
    r = law.repetition_penalty
    for i in range(z.shape[0]):
        if i:
            counts[drafts[i - 1]] += 1
        row, emitted = z[i], counts > 0
        if r != 1.0:
            row.copy_(torch.where(emitted | seen, torch.where(row > 0, row / r, row * r), row))
        if law.frequency_penalty:
            row -= law.frequency_penalty * counts
        if law.presence_penalty:
            row -= law.presence_penalty * emitted.to(row.dtype)
    return z


def pick_ref(z: Tensor, law: Law, u: float) -> int:
    """One token from one processed row.

    Math: temperature 0 (or below MIN_TEMPERATURE): argmax, lowest id on ties. Else z = z / temperature; drop
        exp(z) < min_p * exp(max z); keep the top_k first by (value descending, id ascending); of those keep the
        smallest prefix with mass >= top_p of the kept mass, at least one; take the first token at which the running
        sum exceeds u times the mass of the prefix.
    Shapes: z [A] fp32.
    Numeric: the division in fp32, exponentials and sums in fp64.
    """
    if law.temperature < MIN_TEMPERATURE:
        return int(z.argmax())
    return _draw_sorted(z / law.temperature, law, u)


def _draw_sorted(z: Tensor, law: Law, u: float) -> int:
    """The draw from a row that is already divided by the temperature."""
    values = z.numpy()
    ids = np.arange(values.size)
    order = np.lexsort((ids, -values))
    weights = np.exp(values[order].astype(np.float64) - float(values[order[0]]))
    order = order[: int((weights >= law.min_p).sum())]
    if law.top_k:
        order = order[: law.top_k]
    sums = np.cumsum(weights[: order.size])
    kept = min(int((sums < law.top_p * sums[-1]).sum()) + 1, order.size)
    place = int((sums[:kept] <= u * sums[kept - 1]).sum())
    return int(order[min(place, kept - 1)])


def pick(z: Tensor, law: Law, u: float) -> int:
    """`pick_ref` without sorting the vocabulary: same contract, same result on a CPU tensor."""
    if law.temperature < MIN_TEMPERATURE:
        return int(z.argmax())
    z = z / law.temperature
    if law.top_k:
        values, ids, complete = _leaders(z, min(law.top_k, z.numel()))
        if not complete:
            return _draw_sorted(z, law, u)
        weights = np.exp(values.astype(np.float64) - float(values[0]))
        weights = weights[: int((weights >= law.min_p).sum())]
        sums = np.cumsum(weights)
        kept = min(int(np.searchsorted(sums, law.top_p * sums[-1])) + 1, sums.size)
        place = int(np.searchsorted(sums[:kept], u * sums[kept - 1], side="right"))
        return int(ids[min(place, kept - 1)])
    return _pick_unbounded(z, law, u)


def _leaders(z: Tensor, k: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """The k first of z by (value descending, id ascending); False if a tie at the cut leaves the set open."""
    size = z.numel()
    top = z.topk(min(k + 1, size))
    values, ids = top.values.numpy(), top.indices.numpy()
    complete = k >= size or bool(values[k - 1] > values[k])
    values, ids = values[:k], ids[:k]
    if values.size > 1 and (values[1:] == values[:-1]).any():
        order = np.lexsort((ids, -values))
        values, ids = values[order], ids[order]
    return values, ids, complete


def _pick_unbounded(z: Tensor, law: Law, u: float) -> int:
    """The draw over all ids: the needed prefix is nearly always short, so look at growing ones."""
    best = float(z.max())
    weights = (z.double() - best).exp_()
    total = float(weights[weights >= law.min_p].sum() if law.min_p > 0 else weights.sum())
    floor = math.log(law.min_p) if law.min_p > 0 else -math.inf
    for width in (*_WIDTHS, z.numel()):
        width = min(width, z.numel())
        values, ids, complete = _leaders(z, width)
        if not complete:
            above = int((values > values[-1]).sum())
            values, ids = values[:above], ids[:above]
        whole = width == z.numel()
        scaled = values.astype(np.float64) - best
        if values.size and scaled[-1] < floor:
            whole = True
            scaled = scaled[np.exp(scaled) >= law.min_p]
        sums = np.cumsum(np.exp(scaled))
        kept = int(np.searchsorted(sums, law.top_p * total)) + 1 if law.top_p < 1.0 else sums.size + 1
        if kept > sums.size and not whole:
            if law.top_p < 1.0 or not sums.size or u * total >= sums[-1]:
                continue
            return int(ids[int(np.searchsorted(sums, u * total, side="right"))])
        kept = min(kept, sums.size)
        place = int(np.searchsorted(sums[:kept], u * sums[kept - 1], side="right"))
        return int(ids[min(place, kept - 1)])
    raise AssertionError("the last width is the whole row")


def accepted(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """How many drafts stand: the length of the common prefix of the sampled tokens and the drafts."""
    count = 0
    for token, draft in zip(tokens, drafts, strict=False):
        if token != draft:
            break
        count += 1
    return count


def log_probabilities(logits: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-probability of a token, and the `count` most likely (id, value) pairs, of one raw row.

    Math: log softmax of the model's own logits (no bias, penalty, temperature or cut), ties by id.
    Shapes: logits [A] fp32. Numeric: the log-sum-exp in fp64.
    """
    norm = float(torch.logsumexp(logits.double(), 0))
    top: list[tuple[int, float]] = []
    if count:
        values, ids, complete = _leaders(logits, min(count, logits.numel()))
        if not complete:
            order = np.lexsort((np.arange(logits.numel()), -logits.numpy()))[:count]
            values, ids = logits.numpy()[order], order
        top = [(int(i), float(v) - norm) for i, v in zip(ids, values, strict=True)]
    return float(logits[token]) - norm, top
