"""A request becomes a prompt: its conversation rendered by the model's own template, media expanded, tokenised."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..config import ModelConfig
from ..errors import ContentError, ContextOverflowError, InvalidRequestError, UnsupportedError
from ..types import Image, PreparedMedium, Request, Tool, Video
from .conversation import IM_END, IM_START, MARK, OPEN, SYSTEM, Conversation, unmark
from .output import OutputMachine
from .template import ChatTemplate
from .tokenizer import Tokenizer

ASSISTANT = IM_START + "assistant\n"
THINK_CLOSE = "\n</think>\n\n"
ENDS = (IM_END, "<|endoftext|>")

_MEDIUM = re.compile(rf"<\|vision_start\|><\|(image|video)_pad\|><\|vision_end\|>{MARK}")

PRESETS: dict[str, dict[bool, dict[str, float]]] = {
    "qwen3.6-27b": {
        True: {"presence_penalty": 0.0},
        False: {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
    },
    "qwen3.6-35b-a3b": {
        True: {"presence_penalty": 1.5},
        False: {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
    },
}
"""What the publisher advises beyond `generation_config.json`: model id -> thinking -> sampling parameters."""


class MediaInput(PreparedMedium, Protocol):
    """A prepared image or video. `text` replaces the template's `<|vision_start|>..<|vision_end|>` for it."""

    @property
    def text(self) -> str:
        """Ordinary text, vision markers and one pad token per feature."""


class MediaReader(Protocol):
    """Fetches and prepares media; raises `MediaError` for what cannot be read. `media.MediaLoader` does it."""

    @property
    def most_patches(self) -> int:
        """Patch rows of the largest image or video."""

    def load(self, part: Image | Video) -> MediaInput:
        """Prepare one image or video."""

    def start(self) -> None:
        """Get ready for the first one."""

    def close(self) -> None:
        """Free what reading needed."""


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """A prepared medium and the token spans [start, stop) of its pads: one for an image, one per pair for a video."""

    media: MediaInput
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt.

    Attributes:
        token_ids: the tokens.
        thinking: the output starts inside a think block.
        media: images and videos in order of appearance.
        checkpoints: numbers of leading tokens after which a state checkpoint pays, ascending: the end of the system
            turn with the tools, and the place where the rendering of the next turn can first differ.
        cuts: these places in all turns so far, not in the last one alone: where reading a prompt may pause, so that a
            conversation that goes on is read in the same pieces as before.
        text: the prompt as text, media expanded.
        continued: the output continues the text of the last assistant message.
    """

    token_ids: tuple[int, ...]
    thinking: bool
    media: tuple[PlacedMedia, ...] = ()
    checkpoints: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    text: str = ""
    continued: bool = False


def tool_json(tool: Tool) -> Mapping[str, Any]:
    """The JSON object of a tool as the template prints it: the client's own if there is one."""
    if tool.raw is not None:
        return tool.raw
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.parameters}}


class Frontend:
    """Everything between requests and token ids for one model. One object may be used from several threads.

    Args:
        resources: the checkpoint's files by name: `tokenizer.json`, `chat_template.jinja`, and if present
            `tokenizer_config.json` and `generation_config.json`.
        config: the model.
        media: prepares images and videos; None refuses them.
        strict: special-token text inside messages, tools and arguments stays ordinary text. The default turns it into
            the special tokens, as other implementations of this format do.

    Raises:
        ContentError: a file is missing or cannot be used.
    """

    def __init__(
        self,
        resources: Mapping[str, bytes],
        config: ModelConfig,
        *,
        media: MediaReader | None = None,
        strict: bool = False,
    ) -> None:
        for name in ("tokenizer.json", "chat_template.jinja"):
            if name not in resources:
                raise ContentError(f"{name} is missing from the model's files")
        get = resources.get
        self.config = config
        self.strict = strict
        self.media = media
        self.tokenizer = Tokenizer(resources["tokenizer.json"], get("tokenizer_config.json"))
        if self.tokenizer.addressable > config.vocab_size:
            raise ContentError(
                f"the tokenizer has {self.tokenizer.addressable} ids, the model's matrices {config.vocab_size} rows"
            )
        try:
            source = resources["chat_template.jinja"].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ContentError(f"chat_template.jinja is not UTF-8 text: {error}") from error
        self.template = ChatTemplate(source, clean=self._clean)
        self._generation = _read_generation(get("generation_config.json"))
        self.eos_ids = self._eos()
        self._close_ids = tuple(self.tokenizer.encode(THINK_CLOSE))
        self._header = list(self.tokenizer.encode(ASSISTANT))

    def _eos(self) -> tuple[int, ...]:
        """Ids that end an output: those of the generation configuration and the end of a turn."""
        given = self._generation.get("eos_token_id")
        ids = [] if given is None else given if isinstance(given, list) else [given]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.config.vocab_size:
                raise ContentError(
                    f"generation_config.json: eos_token_id holds {token!r:.80}; "
                    f"token ids are integers from 0 to {self.config.vocab_size - 1}"
                )
        return tuple(dict.fromkeys([*ids, *(self.tokenizer.id(text) for text in ENDS)]))

    def seeing(self, resources: Mapping[str, bytes]) -> Frontend:
        """This frontend with images and videos read, by the model's own settings in `resources`.

        Raises:
            InvalidRequestError: the model has no vision tower. ContentError, MissingDependencyError: see `MediaLoader`.
        """
        if self.config.vision is None:
            raise InvalidRequestError("vision is on, but the model has no vision tower; leave it off", param="vision")
        from .media import MediaLoader

        made = copy.copy(self)
        made.media = MediaLoader(resources, self.config.vision)
        return made

    def _clean(self, text: str) -> str:
        """Text from outside: no marks of ours; in strict mode no special token's spelling stays whole."""
        text = unmark(text)
        if self.strict:
            text = self.tokenizer.pattern.sub(lambda match: match.group()[:1] + MARK + match.group()[1:], text)
        return text

    def generation_defaults(self, thinking: bool) -> dict[str, float]:
        """Sampling parameters for whatever a request leaves open, by the names of `Sampling`."""
        given = self._generation
        made = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        made |= {key: given[key] for key in (*made, "repetition_penalty") if given.get(key) is not None}
        if given.get("do_sample") is False:
            made["temperature"] = 0.0
        return {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            **made,
            **PRESETS.get(self.config.model_id, {}).get(thinking, {}),
        }

    def render(self, request: Request) -> str:
        """The prompt text of a request, each image or video as the template's one placeholder.

        Raises:
            InvalidRequestError: the conversation cannot be rendered; the message says why.
        """
        if request.prompt is not None:
            ids = self._raw_ids(request)
            return request.prompt if isinstance(request.prompt, str) else self.tokenizer.decode(ids)
        return self._render(request)[0].replace(MARK, "")

    def prepare(self, request: Request, limit: int | None = None) -> Prompt:
        """The tokens of a request's prompt.

        Args:
            request: the request.
            limit: the context in tokens; a text that is longer in any case is refused before it is encoded.

        Raises:
            ContextOverflowError: the text has more than `limit` tokens, whatever it encodes to; `n_prompt_tokens` is
                the number it has at least. Other prompts above the limit are returned.
            InvalidRequestError: the conversation cannot be rendered; `MediaError` for a medium that cannot be read.
        """
        if request.prompt is not None:
            if isinstance(request.prompt, str):
                self._check_length(request.prompt, limit)
            ids = self._raw_ids(request)
            text = request.prompt if isinstance(request.prompt, str) else self.tokenizer.decode(ids)
            return Prompt(tuple(ids), request.thinking is True, cuts=self._cuts(ids, ()), text=text)
        text, media, thinking = self._render(request)
        text, placed = self._expand(text, media, limit)
        self._check_length(text, limit)
        ids, checkpoints = self._encode(text)
        if not ids:
            raise InvalidRequestError(
                "the model's chat template gives an empty prompt for this conversation; a prompt needs a token",
                param="messages",
            )
        return Prompt(
            tuple(ids),
            thinking,
            self._place(text, ids, placed),
            checkpoints,
            self._cuts(ids, checkpoints),
            text.replace(MARK, ""),
            request.continue_final_message and not thinking,
        )

    def _check_length(self, text: str, limit: int | None) -> None:
        """Refuse a text that has more than `limit` tokens for its bytes alone."""
        if limit is not None and len(text) > limit and (least := self.tokenizer.least(text.replace(MARK, ""))) > limit:
            raise ContextOverflowError(least, limit)

    def machine(self, request: Request, prompt: Prompt) -> OutputMachine:
        """The state machine that reads this request's output."""
        calls = request.tools if request.tool_choice.mode != "none" else ()
        return OutputMachine(
            self.tokenizer.token_bytes,
            eos_ids=self.eos_ids,
            ignore_eos=request.ignore_eos,
            stop_ids=request.stop_token_ids,
            stops=request.stop,
            thinking=prompt.thinking,
            tools=calls,
            parallel=request.parallel_tool_calls,
            close_ids=self._close_ids,
            continued=prompt.continued,
            raw=request.prompt is not None and not prompt.thinking and not calls,
        )

    def _raw_ids(self, request: Request) -> Sequence[int]:
        """The tokens of a prompt given as text or ids."""
        prompt, count = request.prompt, self.tokenizer.addressable
        if request.messages:
            raise InvalidRequestError("give messages or prompt, not both", param="prompt")
        if not prompt:
            raise InvalidRequestError("prompt is empty; give at least one token", param="prompt")
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        for i, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < count:
                raise InvalidRequestError(
                    f"prompt[{i}] is {token!r}; token ids are integers from 0 to {count - 1}", param="prompt"
                )
        return prompt

    def _render(self, request: Request) -> tuple[str, list[Image | Video], bool]:
        """The text with marks left in it, its media, and whether the output starts inside a think block."""
        thinking = request.thinking is not False and request.thinking_budget != 0
        talk = Conversation(request, self._clean)
        if request.continue_final_message:
            thinking = talk.leave_open(request.messages[-1])
        keep = request.preserve_thinking
        if keep is None and request.tools:
            keep = True
        options: dict[str, Any] = {} if keep is None else {"preserve_thinking": keep}
        if request.add_vision_id:
            options["add_vision_id"] = True
        text = self.template.render(
            messages=talk.messages,
            tools=[tool_json(tool) for tool in request.tools] or None,
            add_generation_prompt=not request.continue_final_message,
            enable_thinking=thinking,
            **options,
        )
        if request.continue_final_message:
            text = text[: text.index(OPEN)]
        return talk.put_back(text), talk.media, thinking

    def _expand(
        self, text: str, media: Sequence[Image | Video], limit: int | None
    ) -> tuple[str, list[tuple[MediaInput, int, int]]]:
        """The text with media expanded, each medium with its place in it. Stops where `limit` tokens are passed."""
        if not media:
            return text, []
        if self.media is None:
            raise UnsupportedError(
                f"the request has {len(media)} images or videos, but no vision tower is loaded; send text only, or "
                "load a model that has one with vision=True (on the command line --vision)",
                param="messages",
            )
        found = list(_MEDIUM.finditer(text))
        if [match.group(1) == "image" for match in found] != [isinstance(part, Image) for part in media]:
            raise InvalidRequestError("the chat template did not print one placeholder per medium", param="messages")
        pieces: list[str] = []
        placed: list[tuple[MediaInput, int, int]] = []
        end = length = pads = 0
        for match, part in zip(found, media, strict=True):
            loaded = self.media.load(part)
            pads += loaded.text.count("_pad|>")
            if limit is not None and pads > limit:
                raise ContextOverflowError(pads, limit)
            pieces += [text[end : match.start()], loaded.text]
            length += match.start() - end
            placed.append((loaded, length, length + len(loaded.text)))
            length += len(loaded.text)
            end = match.end()
        return "".join([*pieces, text[end:]]), placed

    def _place(
        self, text: str, ids: Sequence[int], placed: Sequence[tuple[MediaInput, int, int]]
    ) -> tuple[PlacedMedia, ...]:
        """Token spans of the media: the n-th pad in the text is the n-th pad token, a user's own included."""
        if not placed:
            return ()
        pads = re.compile(r"<\|(?:image|video)_pad\|>")
        wanted = {self.tokenizer.id("<|image_pad|>"), self.tokenizer.id("<|video_pad|>")}
        where = [i for i, token in enumerate(ids) if token in wanted]
        offsets = [match.start() for match in pads.finditer(text)]
        made: list[PlacedMedia] = []
        for loaded, start, stop in placed:
            spans: list[tuple[int, int]] = []
            for token in (token for token, at in zip(where, offsets, strict=True) if start <= at < stop):
                if spans and spans[-1][1] == token:
                    spans[-1] = (spans[-1][0], token + 1)
                else:
                    spans.append((token, token + 1))
            made.append(PlacedMedia(loaded, tuple(spans)))
        return tuple(made)

    def _encode(self, text: str) -> tuple[list[int], tuple[int, ...]]:
        """Token ids and checkpoints. Text is cut only where a special token starts, which changes no token."""
        cuts: list[int] = []
        if text.startswith(SYSTEM) and (end := text.find(IM_END + "\n" + IM_START)) >= 0:
            cuts.append(end + len(IM_END) + 1)
        header = text.rfind(ASSISTANT) + len(ASSISTANT)
        if header >= len(ASSISTANT) and self.tokenizer.pattern.match(text, header):
            cuts.append(header)
        ids: list[int] = []
        checkpoints: list[int] = []
        start = 0
        for cut in sorted(set(cuts)):
            ids += self.tokenizer.encode(text[start:cut], broken_by=MARK)
            checkpoints.append(len(ids))
            start = cut
        return ids + self.tokenizer.encode(text[start:], broken_by=MARK), tuple(checkpoints)

    def _cuts(self, ids: Sequence[int], checkpoints: Sequence[int]) -> tuple[int, ...]:
        """The checkpoints and the ends of all assistant headers. Each is found by the tokens before it."""
        header, at, found = self._header, -1, set(checkpoints)
        ids = list(ids)
        while (at := _index(ids, header[0], at + 1)) >= 0:
            if ids[at : at + len(header)] == header and at + len(header) < len(ids):
                found.add(at + len(header))
        return tuple(sorted(found))


def _index(ids: list[int], token: int, start: int) -> int:
    """Where a token comes next, -1 if it does not."""
    try:
        return ids.index(token, start)
    except ValueError:
        return -1


_GENERATION_LIMITS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.001, 10.0),
}


def _read_generation(data: bytes | None) -> dict[str, Any]:
    """The contents of `generation_config.json`, the sampling parameters in it checked."""
    try:
        found = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise ContentError(f"generation_config.json is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ContentError(f"generation_config.json holds a {type(found).__name__}; it must be an object")
    for key, (low, high) in _GENERATION_LIMITS.items():
        value = found.get(key)
        fine = isinstance(value, int if key == "top_k" else int | float) and not isinstance(value, bool)
        if value is not None and not (fine and low <= value <= high):
            kind = "an integer" if key == "top_k" else "a number"
            raise ContentError(
                f"generation_config.json: {key} is {value!r:.80}; it must be {kind} from {low} to {high}"
            )
    return found
