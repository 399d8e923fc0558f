"""From an artifact to a runner that is ready: device, weights, memory plan, state."""

from __future__ import annotations

import gc
import importlib.util
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..artifact import Artifact
from ..config import ModelConfig
from ..errors import DeviceError, MemoryPlanError, UnsupportedError
from ..footprint import Footprint, fused_footprint, reference_footprint
from ..hosted import HostState
from ..model.decoder import Decoder
from ..model.mtp import MTP
from ..model.vision import VisionTower, tower_workspace
from ..packed_tree import PackedWeights
from ..staging import Progress, transfer
from ..state import FusedState, State
from ..types import TokenLogprob
from ..weights import load_tower, load_weights
from .flights import LaneRounds
from .options import EngineOptions
from .planning import CHUNK_WORKSPACE, Plan, budget_of, check_host, choose_chunk, plan
from .reuse import Reuse
from .runner import Runner
from .sampler import RawLogprob

if TYPE_CHECKING:
    from ..model.fused import FusedDecoder, FusedMTP

log = logging.getLogger("ninfer.engine")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU_ROUTE = "cpu: torch reference path"
CHUNK = 256
"""Prompt tokens per step on the CPU where `prefill_chunk` is "auto"; on a GPU the plan chooses (`choose_chunk`)."""
OLDEST = (8, 0)
"""The oldest compute capability that the kernels run on."""
_SMALL = 1 << 28
"""Weights up to this many bytes: the work per step is too small for a second thread to help."""


@dataclass(slots=True)
class LoadedModel:
    """A model on its device with its state. `route` says what computes: device and kind of kernels.

    `chunk`: prompt tokens per step. `lanes`: what decodes on the device without the host, if that can be.
    `host`: host memory of the prefix cache, if it was asked for.
    """

    decoder: Decoder | FusedDecoder
    mtp: MTP | FusedMTP | None
    state: State | FusedState
    plan: Plan
    device: torch.device
    route: str
    draft_tokens: int
    threads: int
    tower: VisionTower | None
    chunk: int
    lanes: LaneRounds | None = None
    host: HostState | None = None

    def runner(
        self,
        decorate: Callable[[Sequence[RawLogprob]], list[TokenLogprob]],
        *,
        adaptive: bool,
        answers: bool = True,
        describe: Callable[[Sequence[Any]], str] = str,
    ) -> Runner:
        """What runs sequences on it; `answers` and `describe` are those of `Reuse`, the rest of `Runner`."""
        reuse = Reuse(
            self.state,
            slots=self.plan.slots,
            pages=self.plan.pages,
            checkpoints=self.plan.checkpoints,
            chunk=self.chunk,
            host=self.host,
            answers=answers,
            describe=describe,
        )
        made = Runner(
            self.decoder,
            self.mtp,
            self.state,
            reuse=reuse,
            draft_tokens=self.draft_tokens,
            prefill_chunk=self.chunk,
            decorate=decorate,
            device=self.device,
            adaptive=adaptive,
            tower=self.tower,
            lanes=self.lanes,
        )
        chunks = getattr(self.decoder, "chunks", None)
        if chunks is not None:
            made.warming = chunks.warm()
        return made

    def free(self) -> None:
        """Give a GPU's memory back now. The loop has ended: nothing runs on the model any more."""
        if self.device.type != "cuda":
            return  # host memory goes with the last reference
        torch.cuda.synchronize(self.device)
        if self.host is not None:
            self.host.free()
        weights = self.decoder.weights
        if isinstance(weights, PackedWeights):
            weights.free()
        self.state.free()
        del self.decoder, self.mtp, self.state, self.tower, self.lanes, self.host
        gc.collect()  # graphs and workspaces refer to each other
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Reading:
    """How the files are read: with their digests checked, and with whom told of the progress."""

    verify: bool = False
    progress: Progress | None = None


def choose_device(wanted: str) -> tuple[torch.device, str]:
    """The device and the label of what will compute there.

    Raises:
        DeviceError: CUDA was asked for and is not there, or the card is too old for the kernels.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu"), CPU_ROUTE
    if not torch.cuda.is_available():
        raise DeviceError('device is "cuda", but torch sees no CUDA device; use device="cpu" or fix the driver')
    device = torch.device("cuda", torch.cuda.current_device())
    lack = _lack(device)
    if lack is None:
        major, minor = torch.cuda.get_device_capability(device)
        return device, f"cuda: fused Triton kernels on {torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if wanted == "cuda":
        raise DeviceError(f'device is "cuda", but {lack}; use device="cpu"')
    log.warning("a CUDA device is present, but %s: running on the CPU", lack)
    return torch.device("cpu"), CPU_ROUTE


def _lack(device: torch.device) -> str | None:
    """What keeps the kernels from running on a card; None if nothing does."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST:
        return (
            f"{torch.cuda.get_device_name(device)} is of compute capability {major}.{minor}, and the kernels need "
            f"{OLDEST[0]}.{OLDEST[1]}"
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton, which compiles the kernels, is not installed"
    return None


def load_model(
    artifact: Artifact,
    options: EngineOptions,
    most_patches: int = 0,
    addressable: int = 0,
    progress: Progress | None = None,
) -> LoadedModel:
    """Read the weights and allocate the state.

    Args:
        artifact: an open artifact, or one that makes its weights itself, with `packed(device, mtp, host_embedding)`
            on a GPU: the bench's.
        options: of the engine.
        most_patches: of the largest medium, if media are read.
        addressable: ids below this have text (0: all have); the device draws no other.
        progress: called with (bytes done, bytes in all) while weights are read.

    Raises:
        DeviceError, MemoryPlanError, ArtifactError: see `choose_device`, `planning.plan` and `Artifact`.
    """
    device, route = choose_device(options.device)
    config = artifact.config
    drafts = options.draft_tokens if config.mtp_num_hidden_layers else 0
    if drafts < options.draft_tokens:
        log.warning("the model has no draft layer: draft_tokens=%d has no effect", options.draft_tokens)
    sees = config.vision if options.vision else None
    patches = _patches_in_context(config, options, most_patches)
    itemsize = 4 if device.type == "cpu" else 2
    workspace = tower_workspace(sees, itemsize, patches) if sees is not None else 0
    load = _load_reference if device.type == "cpu" else _load_fused
    reading = Reading(options.verify, progress)
    loaded = load(artifact, options, device, drafts, workspace, addressable or config.vocab_size, reading)
    loaded.route = route
    if loaded.plan.host_blocks:
        try:
            loaded.host = HostState(loaded.state, loaded.plan.host_blocks)
        except BaseException:
            loaded.free()
            raise
    log.info("loaded %s on %s, context %d tokens\n%s", options.model, route, loaded.plan.context_length,
             loaded.plan.table())  # fmt: skip
    return loaded


def _load_reference(
    artifact: Artifact,
    options: EngineOptions,
    device: torch.device,
    drafts: int,
    workspace: int,
    addressable: int,
    reading: Reading,
) -> LoadedModel:
    """The torch path."""
    dtype, config = _DTYPES["float32" if options.dtype == "auto" else options.dtype], artifact.config
    sees = options.vision and config.vision is not None
    footprint = reference_footprint(
        config, _objects(artifact), itemsize=dtype.itemsize, kv_cache=options.kv_cache, drafts=drafts,
        chunk=CHUNK if options.prefill_chunk == "auto" else options.prefill_chunk, vision=sees,
    )  # fmt: skip
    made = plan(config, options, footprint, budget=budget_of(options, device), vision_bytes=workspace)
    check_host(made, device)
    if reading.verify:
        transfer([], device, digests=artifact.digests(), progress=reading.progress)
    weights = load_weights(artifact, device, dtype, mtp=drafts > 0, vision=sees, progress=reading.progress)
    tower = VisionTower(weights.vision, config.vision) if weights.vision and config.vision else None
    state = State(
        config,
        slots=made.slots + made.checkpoints,
        pages=made.pages,
        kv_dtype=options.kv_cache,
        max_draft=drafts,
        device=device,
    )
    threads = options.threads
    if threads == "auto":
        threads = 1 if footprint.weights <= _SMALL else torch.get_num_threads()
    mtp = MTP(weights, config) if drafts else None
    return LoadedModel(Decoder(weights, config), mtp, state, made, device, "", drafts, threads, tower, footprint.chunk)


def _load_fused(
    artifact: Artifact,
    options: EngineOptions,
    device: torch.device,
    drafts: int,
    workspace: int,
    addressable: int,
    reading: Reading,
) -> LoadedModel:
    """The Triton path: packed weights, and rounds on the device.

    Raises:
        UnsupportedError: an option that only the torch path has.
    """
    from ..model.fused import workspace_bytes
    from ..model.fused_prefill import prefill_bytes
    from ..packed import load_packed
    from .graphs import rounds_bytes

    if options.dtype != "auto":
        raise UnsupportedError(
            f'dtype is {options.dtype!r}, but the kernels compute in their own types; leave dtype at "auto", or use '
            'device="cpu"',
            param="dtype",
        )
    config, objects, host = artifact.config, _objects(artifact), options.embedding == "host"

    def of(chunk: int) -> Footprint:
        described = fused_footprint(
            config, objects, kv_cache=options.kv_cache, drafts=drafts, chunk=chunk, embedding=not host,
            vision=options.vision and config.vision is not None,
        )  # fmt: skip
        return replace(
            described,
            workspaces=lambda context: {
                "workspace of a round": workspace_bytes(config, context + drafts, device=device)
                + rounds_bytes(config, options.max_sequences, described.pages(context), drafts > 0),
                CHUNK_WORKSPACE: prefill_bytes(config, chunk, context + drafts),
            },
        )

    budget = budget_of(options, device)
    footprint = choose_chunk(config, options, of, budget=budget, vision_bytes=workspace)
    made = plan(config, options, footprint, budget=budget, vision_bytes=workspace)
    check_host(made, device)
    own = getattr(artifact, "packed", None)
    if own is not None:
        weights = own(device, drafts > 0, host)
    else:
        weights = load_packed(
            artifact,
            device,
            mtp=drafts > 0,
            host_embedding=host,
            verify=reading.verify,
            progress=reading.progress,
        )
    try:
        return _around(artifact, options, device, drafts, weights, made, addressable)
    except BaseException as error:
        weights.free()
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        torch.cuda.empty_cache()
        if isinstance(error, torch.OutOfMemoryError):
            raise MemoryPlanError(
                "the device has less memory free than when the plan was made: another program took it meanwhile; set "
                f"memory, or end that program. The plan was\n{made.table()}"
            ) from None
        raise


def _around(
    artifact: Artifact,
    options: EngineOptions,
    device: torch.device,
    drafts: int,
    weights: PackedWeights,
    made: Plan,
    addressable: int,
) -> LoadedModel:
    """State and buffers of the Triton path, around its weights."""
    from ..model.fused import FusedDecoder, FusedMTP
    from ..model.fused_prefill import FusedPrefill
    from .graphs import DeviceRounds

    config, chunk = artifact.config, made.footprint.chunk
    tower = None
    if options.vision and config.vision is not None:
        tower = VisionTower(load_tower(artifact, config.vision, device, torch.bfloat16), config.vision)
    slots, context = made.slots + made.checkpoints, made.context_length + drafts
    state = FusedState(
        config, slots=slots, pages=made.pages, kv_dtype=options.kv_cache, max_draft=drafts, device=device
    )
    chunks = FusedPrefill(weights, config, rows=chunk, context=context)
    decoder = FusedDecoder(weights, config, context=context, chunks=chunks)
    mtp = FusedMTP(decoder) if drafts else None
    lanes = DeviceRounds(
        decoder, mtp, state, slots=made.slots, pages=made.footprint.pages(made.context_length), addressable=addressable
    )
    lanes.compile(drafts)
    return LoadedModel(decoder, mtp, state, made, device, "", drafts, 1, tower, chunk, lanes)


def _objects(artifact: Artifact) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (info.shape, info.format) for name, info in artifact.tensors.items()}


def _patches_in_context(config: ModelConfig, options: EngineOptions, most: int) -> int:
    """Patch rows of the largest medium whose features fit into the context."""
    longest = config.max_position_embeddings
    context = longest if options.context_length == "auto" else min(options.context_length, longest)
    return min(most, context * config.vision.spatial_merge_size**2) if config.vision else 0
