"""How clearly right answers are preferred, on questions behind those of the main table, by which settings are chosen.

An accuracy counts a question as 0 or 1; chance among a thousand of them hides what a setting changes. The soft accuracy
counts it as `σ(2 m / s)`: `m` is the score of the right answer less that of the best wrong one, `s` the mean over
questions of the standard deviation of a question's scores, so that a model whose scores are all closer together loses
nothing by it. Scores are log-likelihoods (`acc`), divided by the answers' characters (`acc_norm`). On the same
questions the standard error of a difference is about half of what accuracies have.

Protocol: SmolLM2-135M, float32, calibrated on the first 32 windows of 512 tokens of WikiText-2's validation text; the
questions behind those that zero_shot.py reads for its main table: arc_easy and piqa from the 1173rd, openbook_qa from
the 101st (of which the table of other tasks reads those up to the 400th, and says so). Rows are compared with the first
one.

    python benchmarks/choices.py --data FOLDER --tasks FOLDER --settings '{"sparsity": 0.1, "solver": "paper"}' ...
"""

import math
from pathlib import Path
from statistics import fmean, pstdev

import modegpt
from common import CALIBRATION, add_cache, add_settings, compressed, model_name, opened, parser, run
from modegpt.evaluate import evaluating
from modegpt.measuring.harness import Harness, hushed, local, run_task
from modegpt.measuring.local_tasks import read_task
from modegpt.measuring.paired import compare
from result_file import Results

FIRST = {"arc_easy": 1172, "openbook_qa": 100, "piqa": 1172}
"""Questions before these are for the main table of zero_shot.py."""

Figures = dict[str, list[float]]


def soft_accuracy(scores: list[list[float]], gold: list[int]) -> list[float]:
    """Return `σ(2 m / s)` of each question, from the scores of its answers and the number of the right one."""
    spread = fmean(map(pstdev, scores))
    margins = [own[right] - max(own[:right] + own[right + 1 :]) for own, right in zip(scores, gold, strict=True)]
    return [1 / (1 + math.exp(min(-2 * margin / spread, 50.0))) for margin in margins]


def answers(harness: Harness, path: Path, first: int, limit: int | None) -> Figures:
    """Return the soft accuracies of a file's questions from number `first` on."""
    read = read_task(str(path))
    _metrics, samples = run_task(harness, local(read._replace(records=read.records[first:])), limit)
    gold = [int(sample["doc"]["gold"]) for sample in samples]
    plain = [[float(response[0][0]) for response in sample["resps"]] for sample in samples]
    by_length = [
        [score / len(text) for score, text in zip(own, sample["doc"]["choices"], strict=True)]
        for own, sample in zip(plain, samples, strict=True)
    ]
    return {"acc": soft_accuracy(plain, gold), "acc_norm": soft_accuracy(by_length, gold)}


def main() -> None:
    """Measure every setting that is not in the result file yet."""
    arguments = parser(__doc__, "choices.json")
    arguments.add_argument("--tasks", type=Path, required=True, help="folder with arc_easy.jsonl and the others")
    arguments.add_argument("--limit", type=int, help="questions of each task")
    add_cache(arguments)
    add_settings(arguments)
    asked = arguments.parse_args()
    protocol = {
        "dtype": "float32",
        "calibration": CALIBRATION,
        "questions": {task: f"from number {first + 1}" for task, first in FIRST.items()},
        "limit": asked.limit,
    }
    about = {"model": model_name(asked), "protocol": protocol}
    results = Results(asked.json, about)
    dense, tokenizer, windows, _valid, _test = opened(asked)
    for settings in [None, *asked.settings]:
        if results.has({"settings": settings}):
            continue
        model = dense
        if settings is not None:
            model = compressed(asked, dense, windows, modegpt.CompressionConfig(**settings))
        with evaluating(model), hushed():
            harness = Harness(model, tokenizer, None)
            found = {
                task: answers(harness, asked.tasks / f"{task}.jsonl", first, asked.limit)
                for task, first in FIRST.items()
            }
        means = {task: {key: fmean(values) for key, values in figures.items()} for task, figures in found.items()}
        row = {"settings": settings, "soft_accuracy": means, "questions": found}
        if results.rows:
            over = compare(found, results.rows[0]["questions"]).mean._asdict()
            row["over_first"] = {key: value for key, value in over.items() if "flips" not in key}  # nothing is 0 or 1
        results.add(row, "questions")


if __name__ == "__main__":
    run(main)
