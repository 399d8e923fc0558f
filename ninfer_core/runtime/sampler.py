"""The sampler of one sequence: its parameters, the tokens it has seen, and the draw for every row of a round.

Order of processing for each row (fp32 logits): ids without text are masked; `logit_bias` is added; repetition
penalty over prompt and output (positive logits divided, negative multiplied); frequency and presence penalties over
the output alone, reasoning included; temperature (0: argmax, lowest id on ties); min-p; top-k; top-p; then one draw.
A row behind drafts counts them as output, so the result is that of a run without drafts. A grammar takes part before
the draw: ids that it does not allow are out, and a token that it forces is not drawn.

The random number belongs to the output position (key: the seed, counter: the index of the token in the answer), not
to the moment: the same request gives the same tokens with any number of drafts and among any other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import NinferError
from ..kernels.sampling import log_probabilities, pick, process, uniform
from .validation import SamplingParams

if TYPE_CHECKING:
    from .grammar import Grammar, Row

RawLogprob = tuple[int, float, list[tuple[int, float]]]
"""A token, its log-probability and its alternatives, before ids become text."""


@lru_cache(maxsize=8)
def allowed_ids(mask: bytes, size: int) -> Tensor:
    """The ids of a mask in order, int64. Inside a string one mask follows itself, so the last ones are kept."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=size)
    return torch.from_numpy(np.flatnonzero(bits.view(np.bool_)))


class Sampler:
    """Draws the tokens of one sequence. `addressable`: ids that have text; all others are never drawn."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        addressable: int,
        prompt: Sequence[int] = (),
        logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.params = params
        self.logprobs = logprobs
        self.grammar = grammar
        self._ahead: tuple[list[int], list[Row]] | None = None
        self._addressable = addressable
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        if params.penalized:
            self._counts = torch.zeros(addressable, dtype=torch.int32)
            self._seen = torch.zeros(addressable, dtype=torch.bool)
            self._seen[torch.as_tensor(prompt, dtype=torch.int64)] = True

    def observe(self, tokens: Sequence[int]) -> None:
        """Tokens that were emitted (and kept): from now on they count as output."""
        if self._counts is not None:
            self._counts.index_add_(0, torch.tensor(tokens), torch.ones(len(tokens), dtype=torch.int32))
        if self.grammar is not None:
            self.grammar.observe(tokens)

    def forced(self) -> list[int]:
        """Tokens that the grammar leaves no choice about, to be emitted now; mostly none."""
        return self.grammar.forced() if self.grammar is not None else []

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """Work out what the grammar allows in the rows of the coming `sample`, while the device computes them.

        An error of the grammar waits for `sample`, where it ends this request alone.
        """
        if self.grammar is not None:
            try:
                self._ahead = (list(drafts), self.grammar.rows(drafts))
            except NinferError:
                self._ahead = None

    def stand(self, tokens: Sequence[int], rows: Sequence[Row]) -> list[int]:
        """The tokens that the device drew by these rows, as they stand (`Grammar.stand`)."""
        return list(tokens) if self.grammar is None else self.grammar.stand(tokens, rows)

    def sample(self, logits: Tensor, drafts: Sequence[int], index: int) -> tuple[list[int], list[RawLogprob] | None]:
        """The tokens a round emits: row i judges draft i; the first row that differs ends it.

        `logits` [R, V] fp32: target rows behind the last emitted token and behind each draft; `index`: the position
        in the answer of the first token; R - 1 drafts. Returns between 1 and R tokens, and raw log-probabilities if
        asked for. A row that was looked at and is not finite raises FloatingPointError.
        """
        legal = None if self.grammar is None else self._legal(self.grammar, drafts)
        rows = logits[:, : self._addressable]
        z = process(rows, self.params, self._counts, self._seen, drafts)
        finite = rows.sum(-1).isfinite().tolist()  # a sum is finite only where every term is
        tokens: list[int] = []
        seed = self.params.seed
        for i in range(rows.shape[0]):
            if not finite[i]:
                raise FloatingPointError(f"the logits for output token {index + i} are not finite")
            u = uniform(seed, index + i)
            tokens.append(pick(z[i], self.params, u) if legal is None else self._constrained(z[i], legal, i, u))
            if i < len(drafts) and tokens[i] != drafts[i]:
                break
        if self.logprobs is None:
            return tokens, None
        return tokens, [
            (t, 0.0, [(t, 0.0)])
            if legal is not None and legal[i].forced is not None
            else (t, *log_probabilities(rows[i], t, self.logprobs))
            for i, t in enumerate(tokens)
        ]

    def _legal(self, grammar: Grammar, drafts: Sequence[int]) -> list[Row]:
        """What the grammar allows in each row, up to the first draft that it does not."""
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == list(drafts) else grammar.rows(drafts)

    def _constrained(self, z: Tensor, legal: list[Row], i: int, u: float) -> int:
        """One token of one processed row [A] under the grammar."""
        grammar = self.grammar
        assert grammar is not None
        if grammar.state.closing or i >= len(legal):  # rows worked out before the value began to be closed do not hold
            legal[i:] = [grammar.row()]
        row = legal[i]
        if row.forced is not None:
            grammar.take(row.forced)
            return row.forced
        if row.mask is not None:
            ids = allowed_ids(row.mask, z.numel())
            return grammar.admit(int(ids[0 if ids.numel() == 1 else pick(z[ids], self.params, u)]))
        z = z.clone()
        z[torch.from_numpy(row.banned)] = -torch.inf
        return grammar.admit(pick(z, self.params, u))
