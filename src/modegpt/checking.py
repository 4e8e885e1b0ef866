"""What modegpt can do with a model: told from its config, then proved on a model."""

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig

from .architectures import Architecture, Dimensions, architecture_of
from .cache_name import CACHE
from .compress import compress
from .config import CompressionConfig
from .densify import densify, in_float64
from .inspection import describe
from .modeling_modegpt import decoder_layers
from .tiny import random_model, tiny_config

ROWS, LENGTH = 2, 24
"""Tokens of a check: more than the sliding window and the trained length of a tiny model."""
NEW_TOKENS = 8
SMALL = 10**7
"""Parameters below which a model is checked in float64."""
WINDOW = 64
TOKENS_PER_NEURON = 4
"""Calibration tokens, random ids, as no quality is measured. With fewer than neurons, the refit is ill-conditioned and
its large weights amplify rounding."""
ROUNDING = 1e4
"""Allowed difference of two ways to compute the same logits, in roundings of the largest: some hundred operations in
another order, with room for the refit's large weights. A wrong coordinate changes the logits by their own size."""


@dataclass(frozen=True)
class Check:
    """One line of the answer."""

    name: str
    result: str
    """`told` (a fact), `passed`, `failed` or `skipped`."""
    meaning: str


@dataclass
class Subject:
    """The models that the checks look at."""

    original: Any
    """As it was given: what is compressed."""
    compressed: Any
    dense: Any
    """What the compressed model is held against: the original, in float64 where it is small."""
    architecture: Architecture
    dims: Dimensions

    @property
    def small(self) -> bool:
        """Whether copies in float64, where a wrong number stands out from rounding, cost nothing."""
        return self.original.num_parameters() < SMALL

    def compress(self, windows: Tensor, sparsity: float) -> Any:
        """Return the original, compressed, in the dtype of `dense`."""
        model = compress(self.original, windows, CompressionConfig(sparsity=sparsity))
        return in_float64(model) if self.small else model

    @property
    def ids(self) -> Tensor:
        """Token ids to run."""
        return random_ids(ROWS, LENGTH, self.dense.config, seed=1)

    def allowed(self, logits: Tensor, eager: bool = False) -> float:
        """Return the difference from `logits` that rounding explains.

        Whatever the dtype, stock eager attention takes its softmax in float32, and some families rotate or route in it.
        """
        upcast = eager or not self.dense._supports_sdpa or self.architecture.upcast_rotary or self.architecture.float32
        dtype = torch.float32 if upcast else logits.dtype
        return ROUNDING * torch.finfo(dtype).eps * logits.abs().max().item()


def make_tiny(config: PreTrainedConfig) -> Any:
    """Return a small random model with the switches of `config`."""
    return random_model(tiny_config(config, architecture_of(config)))


def run_checks(dense: Any, sparsity: float, progress: Callable[[str, int, int], None] | None = None) -> list[Check]:
    """Compress a model and hold it against what must be true of every compressed model.

    A check that raises is a failed check: of a family in the making, the first ones to break tell the most.

    Args:
        dense: a causal language model, in float32.
        sparsity: to compress it by.
        progress: called with `check`, the checks done and the checks in all.
    """
    architecture = architecture_of(dense.config)
    dims = Dimensions.of(architecture, dense.config)
    windows = random_ids(max(8, TOKENS_PER_NEURON * dims.d_int // WINDOW), WINDOW, dense.config, seed=2)
    subject = Subject(dense, None, dense, architecture, dims)
    subject.dense = in_float64(dense) if subject.small else dense
    done: list[Check] = []
    for name, check in CHECKS.items():
        try:
            if subject.compressed is None and check is not _sparsity_zero:
                subject.compressed = subject.compress(windows, sparsity)
            result, meaning = check(subject)
        except Exception as problem:  # whatever breaks is the answer
            result, meaning = "failed", f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
        done.append(Check(name, result, meaning))
        if progress is not None:
            progress("check", len(done), len(CHECKS))
    return done


def random_ids(rows: int, length: int, config: Any, seed: int) -> Tensor:
    """Return random token ids, without the first three, which are often special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (rows, length), generator=generator)


@torch.no_grad()
def _logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return model(ids.to(model.device), use_cache=False, **options).logits.cpu()


def _run_hooked(subject: Subject, hooks: list[RemovableHandle]) -> None:
    """Run the dense model with hooks that are already in place, and take them away."""
    try:
        _logits(subject.dense, subject.ids)
    finally:
        for hook in hooks:
            hook.remove()


def _verdict(difference: float, allowed: float, passed: str, failed: str) -> tuple[str, str]:
    told = f"logits differ by {difference:.1e} at most, allowed {allowed:.1e}"
    # Written so that a NaN fails.
    return ("passed", f"{passed} ({told})") if difference <= allowed else ("failed", f"{failed} ({told})")


def _distance(result: Tensor, expected: Tensor) -> float:
    return (result - expected).abs().max().item()


def _sparsity_zero(subject: Subject) -> tuple[str, str]:
    whole, expected = subject.compress(subject.ids, 0.0), _logits(subject.dense, subject.ids)
    return _verdict(
        _distance(_logits(whole, subject.ids), expected),
        subject.allowed(expected),
        "with nothing removed the model computes what it did",
        "with nothing removed it already computes something else: the family's description is wrong",
    )


def _zeroed(subject: Subject) -> tuple[str, str]:
    widened = densify(subject.architecture, subject.dims, subject.compressed, subject.dense)
    expected = _logits(widened, subject.ids)
    if _distance(expected, _logits(subject.dense, subject.ids)) <= subject.allowed(expected):
        return "failed", "nothing was removed: give a larger sparsity"
    return _verdict(
        _distance(_logits(subject.compressed, subject.ids), expected),
        subject.allowed(expected),
        "it computes what the dense model does with the removed coordinates set to zero",
        "it does not compute what the dense model does with the removed coordinates set to zero",
    )


def _silence(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def _typical(subject: Subject) -> nn.Module:
    """Return the first dense block whose MLP has a rank."""
    architecture = subject.architecture
    blocks = decoder_layers(subject.dense, architecture.describe())
    return next(block for block in blocks if not architecture.experts or architecture.mixture(block) is not None)


@torch.no_grad()
def _order(subject: Subject) -> tuple[str, str]:
    """Silence attention, then the MLP, of one block, and see which of its places hear the difference."""
    architecture, block = subject.architecture, _typical(subject)
    places = {"the MLP": block.get_submodule(architecture.experts or architecture.up[0])}
    if not architecture.parallel:
        places[f"`middle` ({architecture.middle})"] = architecture.middle_module(block)

    def heard(silent: Sequence[nn.Module] = ()) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}

        def note(name: str) -> Any:
            return lambda module, arguments: inputs.update({name: arguments[0].clone()})

        hooks = [module.register_forward_pre_hook(note(name)) for name, module in places.items()]
        _run_hooked(subject, hooks + [module.register_forward_hook(_silence) for module in silent])
        return inputs

    attention = [module for module, _as_pair in architecture.mixing(block)]
    plain, silenced = heard(), {"attention": heard(attention)}
    silenced["the MLP"] = heard([block.get_submodule(architecture.experts or architecture.down)])
    if architecture.whole_attention and not _all_mixing_is_named(subject):
        return "failed", f"`middle` ({architecture.middle}) depends on more than what is named: see mixers, middle"
    for source, inputs in silenced.items():
        for name, place in inputs.items():
            expected = source == "attention" and not architecture.parallel
            if torch.equal(place, plain[name]) == expected:
                return (
                    "failed",
                    f"{name} {'does not depend' if expected else 'depends'} on {source}: see parallel, middle",
                )
    return (
        "passed",
        f"attention and MLP are {'parallel' if architecture.parallel else 'one after the other'}, as described",
    )


def _all_mixing_is_named(subject: Subject) -> bool:
    """Whether the residual stream comes to the middle of every block as it is, when all that mixes tokens is silent."""
    seen: list[Tensor] = []
    hooks: list[RemovableHandle] = []
    for block in decoder_layers(subject.dense, subject.architecture.describe()):
        hooks += [module.register_forward_hook(_silence) for module, _as_pair in subject.architecture.mixing(block)]
        for place in (block, subject.architecture.middle_module(block)):
            hooks.append(place.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].clone())))
    _run_hooked(subject, hooks)
    return all(torch.equal(before, middle) for before, middle in zip(seen[::2], seen[1::2], strict=True))


@torch.no_grad()
def _sum(subject: Subject) -> tuple[str, str]:
    """Change what the MLP of one block gives, and see whether the block's output changes by what it should."""
    architecture = subject.architecture
    if not architecture.adds_mlp:
        return "skipped", "the block norms or scales its sum, so the MLP is compressed without the dense model beside"
    block = _typical(subject)
    down = block.get_submodule(architecture.experts or architecture.down)

    def run(change: float) -> tuple[Tensor, Tensor]:
        """Return the MLP's output, each coordinate of it changed, and the block's."""
        seen: list[Tensor] = []

        def alter(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            output = output + change * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype, device=output.device)
            seen.append(output.clone())
            return output

        def note(_module: Any, _inputs: Any, output: Any) -> None:
            seen.append((output[0] if architecture.tuple_output else output).clone())

        _run_hooked(subject, [down.register_forward_hook(alter), block.register_forward_hook(note)])
        return seen[0].view_as(seen[1]), seen[1]

    (output, before), (changed, after) = run(0), run(1)
    expected = architecture.added(block, changed) - architecture.added(block, output)
    difference, allowed = _distance(after - before, expected), subject.allowed(before)
    told = f"off by {difference:.1e} at most, allowed {allowed:.1e}"
    if difference <= allowed:
        return "passed", f"a block adds to the residual stream what is described of its MLP's output ({told})"
    return "failed", f"a block adds something else of its MLP's output: see mlp_norm, mlp_factor, adds_mlp ({told})"


def _parameters(subject: Subject) -> tuple[str, str]:
    dense, left = subject.dense.num_parameters(), subject.compressed.num_parameters()
    report = subject.compressed.modegpt_report
    told = report["parameters"]
    if told != {"dense": dense, "compressed": left}:
        return "failed", f"the report says {told}, and the models have {dense:,} and {left:,} parameters"
    share = report["sparsity"]["blocks"]
    return "passed", f"{dense:,} parameters became {left:,}, as reported: {share:.1%} of the decoder blocks are gone"


def _fresh_process(subject: Subject) -> tuple[str, str]:
    """Load the saved folder where modegpt cannot be imported, and compare the bits."""
    model = subject.compressed.cpu()
    if model.dtype != subject.original.dtype:  # in float64, some constants would be those of float32
        model = copy.deepcopy(model).to(subject.original.dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        torch.save({"ids": subject.ids, "logits": _logits(model, subject.ids)}, folder / "expected.pt")
        found = describe(folder / "model")["parameters"]
        environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "code"), "HF_HUB_OFFLINE": "1"}
        threads = str(torch.get_num_threads())
        run = subprocess.run(
            [sys.executable, "-c", LOADER, str(folder), threads],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if found != subject.compressed.modegpt_report["parameters"]:
        return "failed", f"by its files it has {found}, which is not what the report says: see buffers, file_names"
    if run.returncode == 0:
        return "passed", "saved and opened by transformers alone, with trust_remote_code, it gives the same bits"
    lines = run.stderr.strip().splitlines() or ["no message"]
    return "failed", f"it does not open as it was saved: {lines[-1]}"


LOADER = """
import sys
sys.modules["modegpt"] = None
import torch
from transformers import AutoModelForCausalLM
folder, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
expected = torch.load(folder + "/expected.pt")
model = AutoModelForCausalLM.from_pretrained(folder + "/model", trust_remote_code=True).eval()
with torch.no_grad():
    logits = model(expected["ids"], use_cache=False).logits
assert torch.equal(logits, expected["logits"]), "the logits differ after loading"
"""
"""What the fresh process runs: `sys.modules[name] = None` is how Python marks a module that cannot be imported."""


@torch.no_grad()
def _cached(subject: Subject) -> tuple[str, str]:
    model, ids = subject.compressed, subject.ids.to(subject.compressed.device)
    expected, cache = _logits(model, ids), DynamicCache(config=model.config)
    pieces = [model(piece, **{CACHE: cache}).logits.cpu() for piece in ids.split([9, 1, 4, 1, LENGTH - 15], dim=1)]
    single = subject.architecture.upcast_mixers  # which compute prompts otherwise than single tokens
    difference, allowed = _distance(torch.cat(pieces, dim=1), expected), subject.allowed(expected, single)
    if not difference <= allowed:
        return _verdict(difference, allowed, "", "read piece by piece with a cache it computes something else")
    prompt = ids[:, :9]
    # Its own settings may penalise what was said before, or end early.
    plain = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    kept, model.generation_config = model.generation_config, plain
    try:
        output = model.generate(prompt)
    finally:
        model.generation_config = kept
    scores = _logits(model, output)[:, len(prompt[0]) - 1 : -1]
    chosen = scores.gather(-1, output[:, len(prompt[0]) :, None].cpu())[..., 0]
    short = (scores.max(-1).values - chosen).max().item()
    if short <= subject.allowed(scores, single):
        return "passed", "generating with a cache takes the tokens that a full forward pass finds likeliest"
    return "failed", f"generate takes a token whose logit is {short:.1e} below the likeliest of a full forward pass"


def _kernels(subject: Subject) -> tuple[str, str]:
    model, used = subject.compressed, subject.compressed.config._attn_implementation
    if not model._supports_sdpa:
        return "skipped", "transformers has no SDPA attention for this family"
    found: list[Tensor] = []
    try:
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            found.append(_logits(model, subject.ids))
    finally:
        model.set_attn_implementation(used)
    difference, allowed = _distance(*found), subject.allowed(found[0], eager=True)
    return _verdict(difference, allowed, "both attention kernels give the same", "the two attention kernels disagree")


CHECKS: dict[str, Callable[[Subject], tuple[str, str]]] = {
    "sparsity 0": _sparsity_zero,
    "zeroed coordinates": _zeroed,
    "order in a block": _order,
    "what the MLP adds": _sum,
    "parameter count": _parameters,
    "fresh process": _fresh_process,
    "cached generation": _cached,
    "sdpa and eager": _kernels,
}
