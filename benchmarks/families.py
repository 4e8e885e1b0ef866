"""Families for which no trained weights are at hand: small models of them, trained here, and what they lose.

Four layers of 128 with one or two million parameters each, trained on passages, instructions and Wikipedia until they
use what they have: models trained on a third of that lose next to nothing (docs/log.md). Protocol: float32, `uniform`;
calibrated on 64 windows of 256 tokens of text left out of training, measured on 400 windows of what comes after it.
A model takes some 25 minutes to train on one core, and is kept in `--cache`.

    python benchmarks/families.py --data FOLDER --instruct FILE --tasks FOLDER --cache FOLDER

`--data` holds `wiki.test.raw`, the lines of `--instruct` have a `text`, and `--tasks` holds questions of HellaSwag,
BoolQ and LAMBADA in the shapes of docs/zero-shot.md.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import modegpt
from common import run
from result_file import RESULTS, Results

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 128, 4, 4, 2048, 256
BATCH, STEPS, WARMUP, RATE = 16, 2200, 100, 3e-3
CALIBRATION, EVALUATION = 64, 400
"""Windows."""
SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5)
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}


def opt() -> PreTrainedModel:
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": 4 * WIDTH}
    sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
    drop: dict[str, Any] = {"dropout": 0, "attention_dropout": 0}
    return OPTForCausalLM(OPTConfig(**sizes, **drop, vocab_size=VOCABULARY, pad_token_id=1, **ENDS))


def gpt() -> dict[str, Any]:
    drop = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return {**sizes, **drop, **ENDS}


def gpt_neo() -> PreTrainedModel:
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": VOCABULARY}
    local: dict[str, Any] = {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": LENGTH // 2}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **local, max_position_embeddings=LENGTH, **ENDS))


def rotary(mlp: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": mlp,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
        **ENDS,
    }


def gemma4(mlp: int, **changes: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": WIDTH // HEADS, "hidden_size_per_layer_input": 0}
    windows = {"sliding_window": LENGTH // 2, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    wide: dict[str, Any] = {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = Gemma4TextConfig(**{**rotary(mlp), **sizes, **windows, **wide, **changes}, pad_token_id=1)
    return Gemma4ForCausalLM(config)


def small_gemma4() -> PreTrainedModel:
    """As E2B, whose later layers read keys and values of earlier ones, and every layer inputs of its own."""
    own = {"hidden_size_per_layer_input": WIDTH // 4, "vocab_size_per_layer_input": VOCABULARY}
    types = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    shared: dict[str, Any] = {"layer_types": types, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    return gemma4(2 * WIDTH, **own, **shared, attention_k_eq_v=False, num_global_key_value_heads=None)


def llama4() -> PreTrainedModel:
    """As Scout: in every layer experts, of which a token passes one, and one that all pass."""
    heads: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": WIDTH // HEADS, "attention_chunk_size": LENGTH // 2}
    config = Llama4TextConfig(**rotary(96), **heads, num_local_experts=8, pad_token_id=1)
    return Llama4ForCausalLM(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "opt": opt,
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**gpt())),
    "gptj": lambda: GPTJForCausalLM(GPTJConfig(**gpt(), rotary_dim=WIDTH // HEADS // 2)),
    "gpt_neo": gpt_neo,
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**rotary(4 * WIDTH))),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY, **ENDS)
    ),
    "mpt": lambda: MptForCausalLM(
        MptConfig(d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, max_seq_len=LENGTH, vocab_size=VOCABULARY, **ENDS)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**rotary(3 * WIDTH), num_key_value_heads=2)),
    "gemma4_text": lambda: gemma4(3 * WIDTH),
    "gemma4_text-small": small_gemma4,
    "gemma4_text-experts": lambda: gemma4(
        WIDTH, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=96
    ),
    "llama4_text": llama4,
    "flex_olmo": lambda: FlexOlmoForCausalLM(
        FlexOlmoConfig(**rotary(WIDTH), num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, pad_token_id=1)
    ),
}


def documents(asked: argparse.Namespace) -> list[str]:
    """Return all texts, in an order that is always the same."""

    def records(file: Path) -> Iterator[dict[str, Any]]:
        with file.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    texts = [record["text"] for record in records(asked.instruct)]
    texts += [record["context"] + record["continuation"] for record in records(asked.tasks / "lambada_openai.jsonl")]
    for record in records(asked.tasks / "hellaswag.jsonl"):
        texts.append(record["query"] + " " + record["choices"][record["gold"]])
    passages = (record["query"].rsplit("Question:", 1)[0] for record in records(asked.tasks / "boolq.jsonl"))
    texts += dict.fromkeys(passages)
    lines = (asked.data / "wiki.test.raw").read_text(encoding="utf-8").split("\n")
    texts += ["\n".join(lines[start : start + 8]) for start in range(0, len(lines), 8)]
    random.Random(0).shuffle(texts)
    return texts


def prepared(asked: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return the tokens to train on, nine of ten documents, and those left out."""
    texts = documents(asked)
    n_trained = len(texts) * 9 // 10
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts[:n_trained], trainer)
    parts = texts[:n_trained], texts[n_trained:]
    trained, left_out = (
        torch.tensor([token for each in tokenizer.encode_batch(part) for token in (0, *each.ids)]) for part in parts
    )
    return trained, left_out


def train(family: str, tokens: Tensor, folder: Path) -> None:
    """Train a model by AdamW, its rate falling to 0, and write it."""
    torch.manual_seed(0)
    model = FAMILIES[family]().train()
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    places = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * (1 - step / STEPS)
        starts = torch.randint(0, len(tokens) - LENGTH, (BATCH,), generator=places)
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"{family}: step {step + 1} of {STEPS}, loss {loss.item():.2f}", flush=True)
    unfinished = folder.with_suffix(".partial")
    model.eval().save_pretrained(unfinished)
    unfinished.rename(folder)


def measure(family: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a family, whose model is trained unless it is there."""
    torch.set_num_threads(1)
    trained, left_out = prepared(asked)
    folder = asked.cache / family
    if not folder.exists():
        train(family, trained, folder)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    n_seen = CALIBRATION * LENGTH
    windows, text = left_out[:n_seen].view(-1, LENGTH), left_out[n_seen : n_seen + EVALUATION * LENGTH]
    perplexity = modegpt.perplexity(dense, text, LENGTH).perplexity
    rows = []
    for sparsity in SPARSITIES:
        row: dict[str, Any] = {"family": family, "parameters": dense.num_parameters(), "dense": perplexity}
        row["sparsity"] = sparsity
        for solver in ("paper", "best"):
            config = modegpt.CompressionConfig(sparsity=sparsity, solver=solver, allocation="uniform")
            found = modegpt.perplexity(modegpt.compress(dense, windows, config), text, LENGTH).perplexity
            row[solver] = math.log(found / perplexity)
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Measure every family that is not in the result file yet."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, default=Path("data"))
    arguments.add_argument("--instruct", type=Path, required=True)
    arguments.add_argument("--tasks", type=Path, default=Path("data"))
    arguments.add_argument("--cache", type=Path, required=True, help="where the trained models are kept")
    arguments.add_argument("--jobs", type=int, default=2, help="families at once, each on one core")
    arguments.add_argument("--json", type=Path, default=RESULTS / "families.json")
    asked = arguments.parse_args()
    about = {
        "protocol": {
            "training": f"{STEPS} steps of {BATCH} x {LENGTH} tokens",
            "shape": f"{LAYERS} layers of {WIDTH}, {HEADS} heads, {VOCABULARY} tokens of vocabulary",
            "calibration": f"{CALIBRATION} x {LENGTH} tokens left out of training",
            "evaluation": f"{EVALUATION} x {LENGTH} tokens that follow",
            "allocation": "uniform",
            "dtype": "float32",
            "figures": "rise of log perplexity over the dense model",
        }
    }
    results, failed = Results(asked.json, about), []
    todo = [family for family in FAMILIES if not results.has({"family": family})]
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        running = {pool.submit(measure, family, asked): family for family in todo}
        for future in as_completed(running):
            if (problem := future.exception()) is not None:
                failed.append(f"{running[future]}: {problem}")
                continue
            results.rows += future.result()
            results.rows.sort(key=lambda row: (list(FAMILIES).index(row["family"]), row["sparsity"]))
            results.write()
    if failed:
        raise SystemExit("not measured: " + "; ".join(failed))


if __name__ == "__main__":
    run(main)
