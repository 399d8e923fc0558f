"""From an artifact to a runner that is ready: device, weights, memory plan, state."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..artifact import Artifact
from ..config import ModelConfig
from ..errors import DeviceError
from ..footprint import reference_footprint
from ..kernels import _op
from ..model.decoder import Decoder
from ..model.mtp import MTP
from ..model.vision import VisionTower, tower_workspace
from ..state import State
from ..weights import load_weights
from .options import EngineOptions
from .planning import Plan, budget_of, plan

log = logging.getLogger("ninfer.engine")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SMALL = 1 << 28
"""Weights up to this many bytes: the work per step is too small for a second thread to help."""


@dataclass(slots=True)
class LoadedModel:
    """A model on its device with its state. `route` says what computes: device and kind of kernels."""

    decoder: Decoder
    mtp: MTP | None
    state: State
    plan: Plan
    device: torch.device
    route: str
    draft_tokens: int
    threads: int
    tower: VisionTower | None


def choose_device(wanted: str) -> tuple[torch.device, str]:
    """The device and the label of what will compute there.

    Raises:
        DeviceError: CUDA was asked for and is not there.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise DeviceError('device is "cuda", but torch sees no CUDA device; use device="cpu" or fix the driver')
    if wanted == "cpu" or not available:
        return torch.device("cpu"), "cpu: torch reference path"
    _op._load_routes()
    kernels = sorted(name.removesuffix("_ref") for name in _op._ROUTES)
    if kernels:
        return torch.device("cuda"), f"cuda: Triton kernels for {', '.join(kernels)}; torch reference path for the rest"
    if wanted == "auto":
        log.warning("a CUDA device is present, but this build has no kernels for it: running on the CPU")
        return torch.device("cpu"), "cpu: torch reference path"
    return torch.device("cuda"), "cuda: torch reference path (no kernels of this build; for comparison, not for speed)"


def load_model(artifact: Artifact, options: EngineOptions, most_patches: int = 0) -> LoadedModel:
    """Read the weights and allocate the state. `most_patches`: of the largest medium, if media are read.

    Raises:
        DeviceError, MemoryPlanError, ArtifactError: see `choose_device`, `planning.plan` and `Artifact`.
    """
    device, route = choose_device(options.device)
    name = options.dtype if options.dtype != "auto" else ("float32" if device.type == "cpu" else "bfloat16")
    dtype, config = _DTYPES[name], artifact.config
    drafts = options.draft_tokens if config.mtp_num_hidden_layers else 0
    if drafts < options.draft_tokens:
        log.warning("the model has no draft layer: draft_tokens=%d has no effect", options.draft_tokens)
    sees = options.vision and config.vision is not None
    objects = {name: (info.shape, info.format) for name, info in artifact.tensors.items()}
    footprint = reference_footprint(
        config, objects, itemsize=dtype.itemsize, kv_cache=options.kv_cache, drafts=drafts, vision=sees
    )
    patches = _patches_in_context(config, options, most_patches)
    workspace = tower_workspace(config.vision, dtype.itemsize, patches) if sees and config.vision else 0
    made = plan(config, options, footprint, budget=budget_of(options, device), vision_bytes=workspace)
    weights = load_weights(artifact, device, dtype, mtp=drafts > 0, vision=sees)
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
    log.info("loaded %s on %s, context %d tokens\n%s", options.model, route, made.context_length, made.table())
    return LoadedModel(Decoder(weights, config), mtp, state, made, device, route, drafts, threads, tower)


def _patches_in_context(config: ModelConfig, options: EngineOptions, most: int) -> int:
    """Patch rows of the largest medium whose features fit into the context."""
    longest = config.max_position_embeddings
    context = longest if options.context_length == "auto" else min(options.context_length, longest)
    return min(most, context * config.vision.spatial_merge_size**2) if config.vision else 0
