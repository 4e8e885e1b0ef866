"""Whether a compressed model is what its report and transformers take it for."""

import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from ..cache_name import CACHE
from ..export.stock import stock_model
from ..inspection import describe
from .subject import LENGTH, Subject, distance, logits, verdict

NEW_TOKENS = 8


def parameter_count(subject: Subject) -> tuple[str, str]:
    """Compare what the report says with what the models have."""
    dense, left = subject.dense.num_parameters(), subject.compressed.num_parameters()
    report = subject.compressed.modegpt_report
    told = report["parameters"]
    if told != {"dense": dense, "compressed": left}:
        return "failed", f"the report says {told}, and the models have {dense:,} and {left:,} parameters"
    share = report["sparsity"]["blocks"]
    return "passed", f"{dense:,} parameters became {left:,}, as reported: {share:.1%} of the decoder blocks are gone"


def fresh_process(subject: Subject) -> tuple[str, str]:
    """Load the saved folder where modegpt cannot be imported, and compare the bits."""
    model = subject.compressed.cpu()
    if model.dtype != subject.original.dtype:  # in float64, some constants would be those of float32
        model = copy.deepcopy(model).to(subject.original.dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        torch.save({"ids": subject.ids, "logits": logits(model, subject.ids)}, folder / "expected.pt")
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
def cached_generation(subject: Subject) -> tuple[str, str]:
    """Read piece by piece and generate with a cache, and compare with full forward passes."""
    model, ids = subject.compressed, subject.ids.to(subject.compressed.device)
    expected, cache = logits(model, ids), DynamicCache(config=model.config)
    pieces = [model(piece, **{CACHE: cache}).logits.cpu() for piece in ids.split([9, 1, 4, 1, LENGTH - 15], dim=1)]
    single = subject.architecture.upcast_mixers  # which compute prompts otherwise than single tokens
    difference, allowed = distance(torch.cat(pieces, dim=1), expected), subject.allowed(expected, single)
    if not difference <= allowed:
        return verdict(difference, allowed, "", "read piece by piece with a cache it computes something else")
    prompt = ids[:, :9]
    # Its own settings may penalise what was said before, or end early.
    plain = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    kept, model.generation_config = model.generation_config, plain
    try:
        output = model.generate(prompt)
    finally:
        model.generation_config = kept
    scores = logits(model, output)[:, len(prompt[0]) - 1 : -1]
    chosen = scores.gather(-1, output[:, len(prompt[0]) :, None].cpu())[..., 0]
    short = (scores.max(-1).values - chosen).max().item()
    if short <= subject.allowed(scores, single):
        return "passed", "generating with a cache takes the tokens that a full forward pass finds likeliest"
    return "failed", f"generate takes a token whose logit is {short:.1e} below the likeliest of a full forward pass"


def kernels(subject: Subject) -> tuple[str, str]:
    """Compare torch's attention kernels."""
    model, used = subject.compressed, subject.compressed.config._attn_implementation
    if not model._supports_sdpa:
        return "skipped", "transformers has no SDPA attention for this family"
    found: list[Tensor] = []
    try:
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            found.append(logits(model, subject.ids))
    finally:
        model.set_attn_implementation(used)
    difference, allowed = distance(*found), subject.allowed(found[0], eager=True)
    return verdict(difference, allowed, "both attention kernels give the same", "the two attention kernels disagree")


def stock_class(subject: Subject) -> tuple[str, str]:
    """Compare with what `modegpt export` makes of it."""
    model = subject.compressed
    if model.dtype != subject.original.dtype:
        model = copy.deepcopy(model).to(subject.original.dtype)
    stock, expected = stock_model(model), logits(model, subject.ids)
    return verdict(
        distance(logits(stock, subject.ids), expected),
        subject.allowed(expected),
        f"as a {type(stock).__name__}, with zeros where it needs them, it computes the same",
        f"as a {type(stock).__name__} it computes something else: see width, set_mlp_width, shared_experts",
    )
