"""Estimate of a run's memory, summand by summand, from the sizes of the model and the settings alone.

Weights, gradients and optimizer state are exact counts. Activations follow the tensors that a layer keeps for its backward pass
(about those of Korthikanti et al., arXiv 2205.05198, for a gated MLP and an attention that does not keep its scores). What allocators
lose between blocks is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.config.architecture import Architecture
from rlcli.config.check import data_parallel, longest_tokens, mini_batch
from rlcli.config.schema import DapoRecipe, DpoRecipe

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CACHE_SHARE = 0.4  # of free memory, on a CPU, for all key-value caches together
LEAST_CACHE = 64 << 20
CACHE_BLOCK_TOKENS = 32  # key-values are kept in whole blocks


@dataclass(frozen=True, slots=True)
class Item:
    """One summand: its name, bytes on one device, and how it comes about."""

    name: str
    bytes: int
    how: str


def training(config: DapoRecipe | DpoRecipe, model: Architecture) -> list[Item]:
    """Memory of the fullest training device at its peak, the backward pass of its largest micro-batch."""
    layout, train = config.parallel, config.train
    size, ranks = BYTES[train.dtype], data_parallel(config)
    held = model.parameters(layout.tensor, layout.pipeline)
    tokens = forward_tokens(config)
    master = size != 4
    share = f" / {ranks} data parallel ranks" if ranks > 1 else ""
    items = [
        Item("weights", held * size, f"{count(held)} parameters x {size} bytes"),
        Item("gradients", held * 4, "x 4 bytes, summed in float32"),
        Item("optimizer", held * 8 // ranks, f"two moments x 4 bytes{share}"),
    ]
    if master:
        items.append(Item("master weights", held * 4 // ranks, f"float32 copy{share}"))
    layers = model.layers // layout.pipeline
    one_layer = layer_activation(model, layout.tensor) * size
    flight = layout.pipeline
    pipe = f" x {flight} micro-batches in the pipeline" if flight > 1 else ""
    if train.recompute:
        kept = tokens * (layers * model.hidden * size * flight + one_layer)
        how = f"{tokens:,} tokens x ({layers} layer inputs of {model.hidden * size / 1024:,.1f} KiB{pipe} + one layer of {one_layer / 1024:,.0f} KiB)"
    else:
        kept = tokens * layers * one_layer * flight
        how = f"{tokens:,} tokens x {layers} layers x {one_layer / 1024:,.1f} KiB{pipe}"
    items.append(Item("activations", kept, how))
    vocab = -(-model.vocab // layout.tensor)
    chunk = min(train.head_chunk_tokens, tokens)
    items.append(Item("logits", 3 * chunk * vocab * 4, f"{chunk:,} tokens x {vocab:,} entries x 4 bytes, three times (logits, softmax, gradient)"))
    return items


def layer_activation(model: Architecture, tensor: int) -> int:
    """Numbers that one layer keeps for each token until its backward pass, on one of `tensor` devices.

    Two norms keep their input and output (4 hidden); attention its projections, the rotated queries and keys and its output
    (4 query and 3 key widths); a gated MLP its two projections and their product (3 widths). What the training engine keeps for
    SmolLM2-135M, counted tensor by tensor, is 19.2 KiB a token and layer in bfloat16; this gives 19.1.
    """
    queries, keys = model.heads * model.head_dim // tensor, max(model.kv_heads // tensor, 1) * model.head_dim
    dense = 3 * model.ffn
    mixture = model.experts_per_token * (3 * model.expert_ffn + 2 * model.hidden * tensor)
    mlp = (mixture * model.moe_layers + dense * (model.layers - model.moe_layers)) // model.layers
    return 4 * model.hidden + 4 * queries + 3 * keys + mlp // tensor


def forward_tokens(config: DapoRecipe | DpoRecipe) -> int:
    """Tokens of the largest forward pass of a device: the micro-batch's bound, or all there is where that is less."""
    most = update_tokens(config)
    return min(config.train.micro_batch_tokens, -(-most // data_parallel(config)))


def update_tokens(config: DapoRecipe | DpoRecipe) -> int:
    """Most tokens that the forward passes of one optimizer update compute, over all devices: every sequence of full length."""
    if isinstance(config, DpoRecipe):
        return config.train.batch_pairs * 2 * config.data.max_tokens
    samples = config.rollout.samples_per_prompt
    prompts = 1 if config.train.prefix_sharing != "off" else samples
    return mini_batch(config) * (prompts * config.data.max_prompt_tokens + samples * config.rollout.max_response_tokens)


def rollout(config: DapoRecipe, model: Architecture, room: int | None = None) -> list[Item]:
    """Memory of one device of a rollout engine while it decodes `max_running_samples` samples of full length.

    room: bytes that the key-value cache may take at most; where it is less than wanted, fewer samples run at once.
    """
    engine, tensor = config.rollout, config.rollout.tensor_parallel
    dtype = config.train.dtype if engine.dtype == "auto" else engine.dtype
    size, held = BYTES[dtype], model.parameters(tensor)
    vocab = model.vocab
    running = engine.max_running_samples
    return [
        Item("weights", held * size, f"{count(held)} parameters x {size} bytes"),
        Item("key-value cache", *_cache(config, model, size, room)),
        Item("sampling", 3 * running * vocab * 4, f"{running:,} samples x {vocab:,} entries x 4 bytes, three times (logits, log-probs, sorting)"),
    ]


def _cache(config: DapoRecipe, model: Architecture, size: int, room: int | None) -> tuple[int, str]:
    engine = config.rollout
    if engine.kv_cache_gib > 0:
        return int(engine.kv_cache_gib * 2**30), "rollout.kv_cache_gib"
    token = 2 * model.layers * -(-model.kv_heads // engine.tensor_parallel) * model.head_dim * size
    tokens = cache_tokens(config)
    groups = -(-engine.max_running_samples // engine.samples_per_prompt)
    how = f"{engine.max_running_samples} responses and {groups} prompts of full length = {tokens:,} tokens x {token / 1024:,.1f} KiB"
    if room is not None and room < tokens * token:
        return max(room, 0), f"what is left; {how} would be {tokens * token / 2**30:,.1f} GiB, so fewer samples run at once"
    return max(tokens * token, LEAST_CACHE), how


def cache_tokens(config: DapoRecipe) -> int:
    """Tokens of one engine's key-value cache: all running responses at full length, and each group's prompt once, in whole blocks."""
    engine, block = config.rollout, CACHE_BLOCK_TOKENS
    response = (engine.max_response_tokens // block + 2) * block
    prompt = -(-config.data.max_prompt_tokens // block) * block
    groups = -(-engine.max_running_samples // engine.samples_per_prompt) + 1
    return engine.max_running_samples * response + groups * prompt


def total(items: list[Item]) -> int:
    return sum(item.bytes for item in items)


def count(number: int) -> str:
    """A large count in three digits: 134.5 M, 32.8 B."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return str(number)


def size(number: float) -> str:
    """Bytes in GiB, or in MiB below 0.1 GiB."""
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 / 10 else f"{number / 2**20:,.1f} MiB"


def sequences_fit(config: DapoRecipe | DpoRecipe) -> int:
    """Sequences of full length that one forward pass holds."""
    return config.train.micro_batch_tokens // longest_tokens(config)
