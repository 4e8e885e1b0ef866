"""The rise of log perplexity on held-out text, by which settings are chosen: nothing is chosen on a test text.

Beside it the mean divergence of the next-token distribution from the dense model's, `KL(dense ‖ compressed)` in nats:
the rise counts one token of each distribution, this all of it, so that chance moves it less.

Protocol: SmolLM2-135M, float32, calibrated on the first 32 windows of 512 tokens of WikiText-2's validation text;
measured on 24 windows of 512 tokens each, evenly spaced: of the rest of that text (`like`), of instructions and
answers (`unlike`), and of encyclopedic passages with the rare words that the validation text lacks (`passages`, those
of BoolQ, whose first 400 questions are in the table of other tasks, which says so).
Differences under 0.004 on `like` and 0.015 on the others decide nothing.

    python benchmarks/held_out.py --data FOLDER --instruct FILE --passages FILE --settings '{"sparsity": 0.3}'
"""

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

import modegpt
from common import CALIBRATION, SAMPLES, SEQ_LEN, add_cache, add_settings, compressed, model_name, opened, parser, run
from modegpt.calibration import load_text, tokenize
from modegpt.measuring.local_tasks import read_task
from modegpt.running.damage import divergence
from result_file import Results

EVAL_WINDOWS = 24
PASSAGES = 800
"""The first so many passages are joined to one text."""


def passages(path: Path) -> str:
    """Return the first passages of a file of BoolQ's questions, each once, one after another."""
    found = dict.fromkeys(record["query"].rsplit("\nQuestion", 1)[0] for record in read_task(str(path)).records)
    return "\n\n".join(list(found)[:PASSAGES])


def spread(tokens: Tensor) -> Tensor:
    """Return the tokens of evenly spaced windows of a text."""
    windows = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)
    return windows[torch.arange(EVAL_WINDOWS) * len(windows) // EVAL_WINDOWS].flatten()


@torch.inference_mode()
def mean_divergence(dense: PreTrainedModel, model: PreTrainedModel, tokens: Tensor) -> float:
    """Return the mean `KL(dense ‖ model)` of the next-token distributions over windows of a text, in nats."""
    total = 0.0
    for window in tokens.view(-1, 1, SEQ_LEN):
        expected, found = (each(input_ids=window, use_cache=False).logits[0] for each in (dense, model))
        total += divergence(expected.log_softmax(-1), found)
    return total / len(tokens)


def main() -> None:
    """Measure every setting that is not in the result file yet."""
    arguments = parser(__doc__, "held_out.json")
    arguments.add_argument("--instruct", type=Path, required=True, help="JSON lines with `text`")
    arguments.add_argument("--passages", type=Path, required=True, help="JSON lines with `query`: passage and question")
    add_cache(arguments)
    add_settings(arguments)
    asked = arguments.parse_args()
    protocol = {
        "dtype": "float32",
        "calibration": CALIBRATION,
        "held_out": f"{EVAL_WINDOWS} windows of {SEQ_LEN} tokens each: the rest of wiki.valid.txt, "
        f"{asked.instruct.name}, passages of {asked.passages.name}",
    }
    about = {"model": model_name(asked), "protocol": protocol}
    results = Results(asked.json, about)
    dense, tokenizer, windows, valid, _test = opened(asked)
    texts = {
        "like": spread(valid[SAMPLES * SEQ_LEN :]),
        "unlike": spread(tokenize(load_text(str(asked.instruct), "evaluation"), tokenizer)),
        "passages": spread(tokenize(passages(asked.passages), tokenizer)),
    }

    def logs(model: PreTrainedModel) -> dict[str, float]:
        return {key: math.log(modegpt.perplexity(model, text, SEQ_LEN).perplexity) for key, text in texts.items()}

    if not results.rows:
        results.add({"settings": None, "log_perplexity": logs(dense)})
    first = results.rows[0]["log_perplexity"]
    for settings in asked.settings:
        if results.has({"settings": settings}):
            continue
        model = compressed(asked, dense, windows, modegpt.CompressionConfig(**settings))
        found = logs(model)
        rise = {key: value - first[key] for key, value in found.items()}
        far = {key: mean_divergence(dense, model, text) for key, text in texts.items()}
        row = {"settings": settings, "log_perplexity": found, "rise": rise, "divergence": far}
        row["seconds"] = model.modegpt_report["seconds"]
        results.add(row)


if __name__ == "__main__":
    run(main)
