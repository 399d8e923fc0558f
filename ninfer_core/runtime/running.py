"""One running sequence: what it holds and where its cursor stands; `runner` alone moves it.

A sequence knows its tokens; the first `length` of them are in its state, of which the last `commit` rows wait in the
deferred window until the next call applies them. Tokens behind `length` are known and emitted: the anchor, and forced
tokens after it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from .media import PromptMedia
from .pace import Pace
from .prefix import Checkpoint, Kind
from .rounds import Window
from .sampler import Sampler
from .session import Session

if TYPE_CHECKING:
    from .flights import Seated


@dataclass(slots=True, eq=False)
class Running:
    """One sequence that holds a slot and pages. `target`: how many tokens prefill must put into the state.

    `ends`: where its chunks end; `wanted`: those where a checkpoint pays; `kept`: the checkpoints made of it. `keys`
    are what the prefix cache knows the prompt by. `carry` and `behind` are hidden rows that the draft layer has not
    seen, the one before the next chunk and those of steps without drafts. `seated`: it decodes on the device without
    the host (`flights`). `exact`: the state has the bits of reading the prompt from its start. `media`: positions and
    features of its images and videos.
    """

    session: Session
    sampler: Sampler
    slot: int
    pages: list[int]
    table: Tensor
    tokens: list[int]
    target: int
    length: int = 0
    commit: int = 0
    drafts: list[int] = field(default_factory=list)
    carry: Tensor | None = None
    behind: list[Tensor] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)
    alone: bool = False
    keys: list[Hashable] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    wanted: dict[int, tuple[Kind, bool]] = field(default_factory=dict)
    kept: list[Checkpoint] = field(default_factory=list)
    base: int = 0
    exact: bool = True
    media: PromptMedia | None = None
    seated: Seated | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.session.prompt.token_ids)

    @property
    def emitted(self) -> int:
        """Tokens of the answer so far: the output index of the next one."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def owed(self) -> list[int]:
        """Tokens behind the anchor that are known and emitted, though no row has stood for them yet."""
        return self.tokens[self.length + 1 :]

    @property
    def rope_delta(self) -> int:
        """Rotary position minus token index, behind the prompt."""
        return self.media.rope_delta if self.media is not None else 0

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to be read."""
        return self.length < self.target

    def window(self, rows: int) -> Window:
        """The next `rows` input tokens: known ones, then drafts, then padding that is never kept."""
        known = self.tokens[self.length : self.length + rows]
        tokens = (known + self.drafts)[:rows]
        tokens += [0] * (rows - len(tokens))
        return Window(tokens, self.slot, self.length, self.commit, self.table, self.rope_delta)

    def place(self, length: int) -> Window:
        """A window without tokens: where rows of the draft layer from index `length` on go."""
        return Window([], self.slot, length, 0, self.table, self.rope_delta)
