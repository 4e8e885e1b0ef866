"""A mixture of experts made of the demo model, as no small trained one is at hand: what it loses, and in which time.

The neurons of each MLP are dealt to experts by which of them are used together, a linear router sends each token to
five of eight, and all is distilled from the dense model, on the instructions and what is left of the validation text.
So it has the weights of a language model and routers that choose, but it is no trained mixture. Protocol: float32,
`uniform`; calibrated on the first 32 x 512 tokens of `wiki.valid.txt`, perplexity on the first 48 windows of 512 tokens
of `wiki.test.raw`. The two solvers are timed in turn in one process. Nothing is chosen on the test text.

    python benchmarks/mixture.py --data FOLDER --instruct FILE --made FOLDER

The mixture takes an hour to make on two cores, and is kept in `--made`; the lines of `--instruct` have a `text`.
"""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import modegpt
from common import CALIBRATION, SAMPLES, SEQ_LEN, Opened, model_name, opened, parser, run
from modegpt.observing.in_turn import run_in_turn
from result_file import Results

EXPERTS, CHOSEN = 8, 5
STEPS, BATCH, WARMUP, RATE = 200, 2, 10, 3e-4
"""Of distillation; a step's batch is windows."""
GROUPING = 4096
"""Tokens by which neurons are grouped and the first routers made."""
SPREAD = 0.5
"""Standard deviation of the first routers' logits: shares of experts begin near one another."""
EVAL_WINDOWS = 48
SPARSITIES = (0.2, 0.3)
REPEATS = 2


def together(used: Tensor) -> Tensor:
    """Deal neurons to experts of one size: k-means on how much each is used on each token.

    Args:
        used: `(tokens, neurons)`, not negative.

    Returns:
        `(experts, neurons of one)`, their numbers.
    """
    profiles = functional.normalize(used - used.mean(0), dim=0).mT
    size = len(profiles) // EXPERTS
    centres = profiles[torch.randperm(len(profiles), generator=torch.Generator().manual_seed(0))[:EXPERTS]]
    members = torch.empty(EXPERTS, size, dtype=torch.int64)
    for _ in range(10):
        like = profiles @ functional.normalize(centres).mT
        left, free = [size] * EXPERTS, torch.ones(len(profiles), dtype=torch.bool)
        for place in like.flatten().argsort(descending=True).tolist():  # the likest pair first, while there is room
            neuron, expert = divmod(place, EXPERTS)
            if free[neuron] and left[expert]:
                left[expert] -= 1
                members[expert, left[expert]] = neuron
                free[neuron] = False
        centres = profiles[members].mean(1)
    return members


def router(states: Tensor, weights: Tensor) -> Tensor:
    """Fit `(experts, d_model)` logits to how much each expert would add, `(tokens, experts)`, by ridge regression."""
    wanted = functional.normalize(weights, dim=1)
    wanted = (wanted - wanted.mean(0)) / wanted.std(0) * SPREAD
    moment = states.mT @ states
    moment.diagonal().add_(0.01 * moment.diagonal().mean())
    return torch.linalg.solve(moment, states.mT @ wanted).mT


@torch.no_grad()
def split(dense: Any, tokens: Tensor) -> PreTrainedModel:
    """Return the mixture before it is distilled. Its experts together are the dense MLP, where a token has them all."""
    old = dense.config
    keep = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keep += ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "max_position_embeddings")
    sizes: dict[str, Any] = {key: getattr(old, key) for key in keep}
    config = MixtralConfig(
        **sizes,
        intermediate_size=old.intermediate_size // EXPERTS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
    )
    mixture = MixtralForCausalLM(config).float()
    outside = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
    missing = mixture.load_state_dict(outside, strict=False)
    assert not missing.unexpected_keys
    read: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for index, layer in enumerate(dense.model.layers):
            keep = layer.mlp.register_forward_pre_hook
            hooks.callback(keep(lambda _module, inputs, index=index: read.update({index: inputs[0]})).remove)
        dense(tokens[:GROUPING].view(-1, SEQ_LEN), logits_to_keep=1)
    for index, layer in enumerate(mixture.model.layers):
        mlp, states = dense.model.layers[index].mlp, read[index].flatten(0, 1)
        gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        activations = functional.silu(states @ gate.mT) * (states @ up.mT)
        members = together(activations.abs() * down.norm(dim=0))
        new: Any = layer.mlp
        new.experts.gate_up_proj.copy_(torch.cat((gate[members], up[members]), dim=1))
        new.experts.down_proj.copy_(down[:, members].transpose(0, 1) * CHOSEN)  # shares add up to 1
        adds = torch.stack([(activations[:, own] @ down[:, own].mT).norm(dim=1) for own in members], dim=1)
        new.gate.weight.copy_(router(states, adds))
    return mixture


def distil(mixture: PreTrainedModel, dense: Any, tokens: Tensor) -> None:
    """Train a mixture to predict what the dense model does: the divergence, by AdamW, its rate falling to 0."""
    run_in_turn(mixture)
    trained = [weight for name, weight in mixture.named_parameters() if "embed" not in name]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    places = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARMUP) * (1 - step / STEPS)
        starts = torch.randint(0, len(tokens) - SEQ_LEN, (BATCH,), generator=places)
        batch = torch.stack([tokens[start : start + SEQ_LEN] for start in starts])
        with torch.no_grad():
            told = dense(batch).logits.log_softmax(-1)
        found = mixture(batch).logits.log_softmax(-1)
        loss = functional.kl_div(found, told, log_target=True, reduction="sum") / batch.numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1} of {STEPS}, divergence {loss.item():.3f}", flush=True)


def make(start: Opened, instruct: Path, folder: Path) -> None:
    """Make the mixture and write it. What it is calibrated and measured on is none of its text."""
    dense, tokenizer, windows, valid, _test = start
    with instruct.open(encoding="utf-8") as lines:
        instructions = tokenizer("\n\n".join(json.loads(line)["text"] for line in lines), return_tensors="pt")
    left = valid[max(windows.numel(), len(valid) // 4) :]
    tokens = torch.cat((instructions["input_ids"][0], left))
    places = torch.randperm(len(tokens) // SEQ_LEN, generator=torch.Generator().manual_seed(0))
    mixture = split(dense, tokens.unfold(0, SEQ_LEN, SEQ_LEN)[places].flatten())
    distil(mixture, dense, tokens)
    unfinished = folder.with_suffix(".partial")
    mixture.eval().save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)


def main() -> None:
    """Make the mixture unless it is there, and measure both solvers at each sparsity."""
    arguments = parser(__doc__, "mixture.json")
    arguments.add_argument("--instruct", type=Path, required=True)
    arguments.add_argument("--made", type=Path, required=True, help="folder of the mixture")
    asked = arguments.parse_args()
    start = opened(asked)
    if not asked.made.exists():
        make(start, asked.instruct, asked.made)
    windows, test = start.windows, start.test
    mixture = AutoModelForCausalLM.from_pretrained(asked.made, dtype=torch.float32).eval()
    run_in_turn(mixture)

    def perplexity(model: Any) -> float:
        return modegpt.perplexity(model, test, SEQ_LEN, EVAL_WINDOWS).perplexity

    about = {
        "model": model_name(asked),
        "protocol": {
            "mixture": f"{EXPERTS} experts a layer, {CHOSEN} of them a token",
            "distillation": f"{STEPS} steps of {BATCH} x {SEQ_LEN} tokens",
            "calibration": CALIBRATION,
            "test": f"wiki.test.raw, first {EVAL_WINDOWS} windows of {SEQ_LEN} tokens",
            "allocation": "uniform",
            "dtype": "float32",
            "seconds": f"of {REPEATS} runs in turn",
        },
    }
    results = Results(asked.json, about)
    if not results.rows:
        results.add({"solver": "dense", "sparsity": 0.0, "perplexity": perplexity(mixture)})
    dense = results.rows[0]["perplexity"]
    for sparsity in SPARSITIES:
        if results.has({"sparsity": sparsity}):
            continue
        new = {solver: {"sparsity": sparsity, "solver": solver, "seconds": []} for solver in ("paper", "best")}
        for repeat in range(REPEATS):
            for solver, row in new.items():
                config = modegpt.CompressionConfig(
                    sparsity=sparsity, solver=solver, allocation="uniform", samples=SAMPLES, seq_len=SEQ_LEN
                )
                model = modegpt.compress(mixture, windows, config)
                row["seconds"].append(model.modegpt_report["seconds"])
                if not repeat:
                    row["perplexity"] = perplexity(model)
                    row["rise"] = math.log(row["perplexity"] / dense)
                del model
        times = [median(each["total"] for each in row["seconds"]) for row in new.values()]
        print(sparsity, [row["perplexity"] for row in new.values()], times, times[1] / times[0], flush=True)
        results.rows += new.values()
        results.write()


if __name__ == "__main__":
    run(main)
