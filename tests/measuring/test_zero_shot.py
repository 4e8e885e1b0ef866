"""Zero-shot tasks: lm-eval's figures on our files are ours, a score is the one computed by hand, bad files are told."""

import copy
import importlib.util
import json
import logging
import math
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import lm_eval.api.task
import lm_eval.tasks
import pytest
import torch
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from modegpt import CompressionConfig, InputError, MissingExtraError, NumericalError, compress, evaluate_tasks
from modegpt.calibration import draw_windows, tokenize
from modegpt.measuring.harness import Harness, _manager, run_task
from modegpt.measuring.zero_shot import PRESETS, TaskResult, _mean, open_tasks

WORDS = ("a list", "a mapping of keys", "an integer", "the name", "one or more statements", "None", "an exception")
LINES = 14
# lm-eval's own definitions of a task of each shape.
REFERENCES = {
    "choices": "arc/arc_easy.yaml",
    "contexts": "winogrande/default.yaml",
    "greedy": "lambada/lambada_openai.yaml",
}


def word(index: int) -> str:
    return WORDS[index % len(WORDS)]


def answered(context: str, model: PreTrainedModel, tokenizer: Any) -> tuple[str, str] | None:
    """The context with the model's likeliest next token, if that is a word after a space."""
    with torch.no_grad():
        best = model(**tokenizer(context, return_tensors="pt", return_token_type_ids=False)).logits[0, -1].argmax()
    text = tokenizer.decode(best)
    return (context, text[1:]) if text.startswith(" ") and text[1:].isalpha() else None


def rows(kind: str, model: PreTrainedModel, tokenizer: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same samples as a local file has them and as a data set of the hub would."""
    local, hub = [], []
    for i in range(LINES):
        if kind == "choices":
            texts, question = [word(i), word(2 * i + 1), word(3 * i + 2)], f"what is {word(i + 3)}?"
            local.append({"query": f"Question: {question}\nAnswer:", "choices": texts, "gold": i % 3})
            choices = {"text": texts, "label": ["A", "B", "C"]}
            hub.append({"question": question, "choices": choices, "answerKey": "ABC"[i % 3]})
        if kind == "contexts":
            first, second, rest = word(i), word(i + 1 + i % 5), f"is returned as {word(i + 2)}."
            contexts = [f"The value of {first}", f"The value of {second}"]
            local.append({"contexts": contexts, "continuation": rest, "gold": i % 2})
            options = {"option1": first, "option2": second}
            hub.append({"sentence": f"The value of _ {rest}", **options, "answer": str(i % 2 + 1)})
    if kind == "greedy":
        said = [
            pair for i in range(300) if (pair := answered(f"Statement {i} returns {word(i)} and", model, tokenizer))
        ]
        wrong = [(f"Statement {i} returns", word(i).split()[-1]) for i in range(LINES)]
        for context, answer in [*said[: LINES // 2], *wrong][:LINES]:
            local.append({"context": context, "continuation": answer})
            hub.append({"text": f"{context} {answer}"})
    return local, hub


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama_dir)


@pytest.fixture(scope="module")
def networks(tiny_llama_dir: Path, tokenizer: Any, small_text: str) -> dict[str, PreTrainedModel]:
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    windows = draw_windows(tokenize(small_text, tokenizer), 8, 64, "sequential", 0, "text")
    return {"dense": dense, "compressed": compress(dense, windows, CompressionConfig(sparsity=0.25))}


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("which", ["dense", "compressed"])
def test_equals_simple_evaluate(
    kind: str, which: str, networks: dict[str, PreTrainedModel], tokenizer: Any, tmp_path: Path
):
    model = networks[which]
    local, hub = rows(kind, model, tokenizer)
    ours = evaluate_tasks(model, tokenizer, [write(tmp_path / f"{kind}.jsonl", local)], batch_size=4).tasks[0]
    definition = load_yaml(Path(lm_eval.tasks.__file__).parent / REFERENCES[kind], resolve_func=True)
    definition["metric_list"] = [metric for metric in definition["metric_list"] if metric["metric"] != "perplexity"]
    splits = dict.fromkeys(("train", "validation", "test"), Dataset.from_list(hub))
    definition |= {"custom_dataset": lambda **_: splits, "dataset_kwargs": None}
    definition.pop("tag", None)
    manager = TaskManager(include_defaults=False)  # lm-eval's own tasks take seconds to list
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    tasks = [ConfigurableTask(config=definition)]
    theirs = simple_evaluate(harness, tasks=tasks, bootstrap_iters=1, task_manager=manager)
    assert theirs is not None
    expected = theirs["results"][definition["task"]]
    for name in ("acc", "acc_stderr"):
        assert getattr(ours, name) == expected[f"{name},none"]
    for name in ("acc_norm", "acc_norm_stderr"):
        assert getattr(ours, name) == expected.get(f"{name},none")
    assert 0 < ours.acc < 1  # figures that are all right or all wrong could agree by accident
    assert (ours.samples, ours.truncated) == (LINES, 0)


def test_acc_and_acc_norm_by_hand(networks: dict[str, PreTrainedModel], tokenizer: Any, tmp_path: Path):
    model = networks["dense"]
    records, _ = rows("choices", model, tokenizer)
    right: dict[str, list[float]] = {"acc": [], "acc_norm": []}
    for record in records:
        scores = []
        for choice in record["choices"]:
            start = len(tokenizer(record["query"]).input_ids)
            ids = tokenizer(f"{record['query']} {choice}", return_tensors="pt").input_ids
            with torch.no_grad():
                logs = model(ids).logits[0].double().log_softmax(-1)
            scores.append(sum(logs[at - 1, ids[0, at]].item() for at in range(start, ids.shape[1])))
        by_length = [score / len(choice) for score, choice in zip(scores, record["choices"], strict=True)]
        right["acc"].append(scores.index(max(scores)) == record["gold"])
        right["acc_norm"].append(by_length.index(max(by_length)) == record["gold"])
    found = evaluate_tasks(model, tokenizer, [write(tmp_path / "t.jsonl", records)]).tasks[0]
    assert found.by_sample == right
    assert (found.acc, found.acc_norm) == (sum(right["acc"]) / LINES, sum(right["acc_norm"]) / LINES)
    assert sum(right["acc"]) != sum(right["acc_norm"])
    # The standard error of a mean of zeros and ones, with Bessel's correction; 1e-12 is float64's rounding.
    assert found.acc_stderr == pytest.approx(math.sqrt(found.acc * (1 - found.acc) / (LINES - 1)), rel=1e-12)


def test_a_log_likelihood_is_the_sum_over_the_answers_tokens(networks: dict[str, PreTrainedModel], tokenizer: Any):
    model, context, answer = networks["compressed"], "The list type", " is returned as a mapping"
    harness = Harness(model, tokenizer, None)
    request = Instance("loglikelihood", {}, (context, answer), 0)
    ((score, greedy),) = harness.loglikelihood([request])
    ids = tokenizer(context + answer, return_tensors="pt").input_ids
    labels = ids.clone()
    labels[:, : len(tokenizer(context).input_ids)] = -100
    with torch.no_grad():
        loss = model(ids, labels=labels).loss.item()
    # transformers' mean loss over the answer, times its tokens; 1e-5 is above float32's rounding of either sum.
    assert score == pytest.approx(-loss * int((labels != -100).sum()), rel=1e-5)
    assert not greedy


def test_a_model_in_16_bits_is_scored_in_32(networks: dict[str, PreTrainedModel], tokenizer: Any):
    model = copy.deepcopy(networks["dense"]).bfloat16()
    ids = tokenizer("The list type is returned as a mapping", return_tensors="pt").input_ids
    context, answer = ids[0, :6].tolist(), ids[0, 6:].tolist()
    ((score, _greedy),) = Harness(model, tokenizer, None)._loglikelihood_tokens([(("", ""), context, answer)])
    with torch.no_grad():
        logs = model(ids[:, :-1]).logits[0, 5:].float().log_softmax(-1)
    # float32's rounding; bfloat16's is 4e-3.
    assert score == pytest.approx(logs.gather(1, ids[0, 6:, None]).sum().item(), rel=1e-5)


def test_a_request_is_cut_where_its_last_token_is_not_all_that_exceeds_the_positions(
    networks: dict[str, PreTrainedModel], tokenizer: Any
):
    """The last token of an answer is predicted and not read."""
    harness = Harness(networks["dense"], tokenizer, None)
    for exceeding, cut in ((1, 0), (2, 1)):
        harness._loglikelihood_tokens([(("", ""), [5] * (harness.max_length + exceeding - 2), [6, 7])])
        assert harness.truncated == cut


def test_a_task_that_asks_for_examples_gets_none(networks: dict[str, PreTrainedModel], tokenizer: Any, tmp_path: Path):
    records, _ = rows("choices", networks["dense"], tokenizer)
    (task,) = open_tasks([write(tmp_path / "t.jsonl", records)])
    task.definition.set_config(key="num_fewshot", value=2)
    _, samples = run_task(Harness(networks["dense"], tokenizer, None), task.definition, limit=3)
    asked = [sample["arguments"][0][0] for sample in samples]
    assert asked == [record["query"] for record in records[:3]]


def test_limit_mean_and_progress(networks: dict[str, PreTrainedModel], tokenizer: Any, tmp_path: Path):
    model = networks["dense"]
    files = [write(tmp_path / f"{kind}.jsonl", rows(kind, model, tokenizer)[0]) for kind in REFERENCES]
    calls: list[tuple[str, int, int]] = []
    result = evaluate_tasks(model, tokenizer, files, limit=5, progress=lambda *call: calls.append(call))
    choices, contexts, greedy = result.tasks
    assert [task.samples for task in result.tasks] == [5, 5, 5]
    assert [task.task for task in result.tasks] == list(REFERENCES)
    assert contexts.acc_norm is None
    assert greedy.acc_norm is None
    assert result.mean.acc == pytest.approx((choices.acc + contexts.acc + greedy.acc) / 3, rel=1e-12)
    assert result.mean.acc_norm == pytest.approx((choices.acc_norm + contexts.acc + greedy.acc) / 3, rel=1e-12)
    errors = [task.acc_stderr for task in result.tasks]
    assert result.mean.acc_stderr == pytest.approx(math.sqrt(sum(error**2 for error in errors)) / 3, rel=1e-12)
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == list(REFERENCES)
    for name in REFERENCES:
        done = [(step, total) for stage, step, total in calls if stage == name]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1] > 0
    single = evaluate_tasks(model, tokenizer, files[:1], limit=1)
    assert single.tasks[0].acc_stderr is None
    assert single.mean.acc_stderr is None


def test_over_another_model(networks: dict[str, PreTrainedModel], tokenizer: Any, tmp_path: Path):
    files = [write(tmp_path / f"{kind}.jsonl", rows(kind, networks["dense"], tokenizer)[0]) for kind in REFERENCES]
    torch.manual_seed(1)
    untrained = AutoModelForCausalLM.from_config(networks["dense"].config)
    dense, other = (evaluate_tasks(model, tokenizer, files) for model in (networks["dense"], untrained))
    found = other.over(dense)
    assert list(found.tasks) == list(REFERENCES)
    for one, base in zip(other.tasks, dense.tasks, strict=True):
        # 1e-12 is above float64's rounding of a mean of 14 zeros and ones.
        assert found.tasks[one.task].acc == pytest.approx(one.acc - base.acc, abs=1e-12)
    assert found.mean.acc == pytest.approx(other.mean.acc - dense.mean.acc, abs=1e-12)
    assert found.mean.acc_norm == pytest.approx(other.mean.acc_norm - dense.mean.acc_norm, abs=1e-12)
    assert found.tasks["greedy"].acc < 0  # half of the answers there are the dense model's own
    with pytest.raises(InputError, match=r"choices \(5\).* and choices \(14\)"):
        evaluate_tasks(networks["dense"], tokenizer, files[:1], limit=5).over(dense)
    with pytest.raises(InputError, match=r"choices \(5\).* and choices \(14\)"):
        evaluate_tasks(networks["dense"], tokenizer, files, limit=5).over(dense)


def test_progress_counts_answers(networks: dict[str, PreTrainedModel], tokenizer: Any, tmp_path: Path):
    choices = ["A", "B", "a longer one"]
    records = [{"query": f"Question {i}\nAnswer:", "choices": choices, "gold": i % 3} for i in range(6)]
    calls: list[tuple[str, int, int]] = []
    file = write(tmp_path / "letters.jsonl", records)
    evaluate_tasks(networks["dense"], tokenizer, [file], batch_size=4, progress=lambda *call: calls.append(call))
    # Two questions of three answers are more than a batch of four; the long answer runs apart from the short ones.
    assert calls == [("letters", done, 18) for start in range(0, 18, 3) for done in (start + 1, start + 3)]


def test_nothing_of_the_callers_changes(
    networks: dict[str, PreTrainedModel], tokenizer: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    model = networks["dense"]
    own = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    own.pad_token = None
    file = write(tmp_path / "choices.jsonl", rows("choices", model, tokenizer)[0])
    level, bar = logging.getLogger("lm_eval").level, lm_eval.api.task.tqdm
    model.train()
    try:
        evaluate_tasks(model, own, [file], limit=3)
        assert all(module.training for module in model.modules())
    finally:
        model.eval()
    assert own.pad_token is None
    assert (logging.getLogger("lm_eval").level, lm_eval.api.task.tqdm) == (level, bar)
    assert capfd.readouterr() == ("", "")


def test_a_context_too_long_is_cut_and_counted(
    networks: dict[str, PreTrainedModel], tokenizer: Any, small_text: str, tmp_path: Path
):
    records = [{"query": small_text[:n], "choices": ["a list", "None"], "gold": 0} for n in (200, 4000)]
    file = write(tmp_path / "long.jsonl", records)
    assert len(tokenizer(records[1]["query"]).input_ids) > 512
    assert evaluate_tasks(networks["dense"], tokenizer, [file]).tasks[0].truncated == 2
    answer = write(tmp_path / "answer.jsonl", [{"context": "a", "continuation": small_text[:4000]}])
    with pytest.raises(InputError, match="512 positions"):
        evaluate_tasks(networks["dense"], tokenizer, [answer])


def test_a_few_answers_may_begin_with_a_space(tmp_path: Path):
    write(tmp_path / "t.jsonl", [{"context": "a", "continuation": text} for text in ("b", " c", "d")])
    assert len(open_tasks([str(tmp_path / "t.jsonl")])) == 1


def test_tokens_outside_the_vocabulary_are_an_error(tiny_llama_dir: Path, tokenizer: Any, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.resize_token_embeddings(8)
    file = write(tmp_path / "t.jsonl", [{"context": "a list", "continuation": "is mutable"}])
    with pytest.raises(InputError, match="the model has 8 of them"):
        evaluate_tasks(model, tokenizer, [file])


def test_nan_is_an_error(tiny_llama_dir: Path, tokenizer: Any, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = math.nan
    file = write(tmp_path / "t.jsonl", [{"context": "a b", "continuation": "c"}])
    with pytest.raises(NumericalError, match="NaN"):
        evaluate_tasks(model, tokenizer, [file])


GOOD = {"query": "q", "choices": ["a", "b"], "gold": 1}
MALFORMED = {
    "not json": ("{oops", ["line 2", "not JSON"]),
    "not an object": ("[1, 2]", ["line 2", "not a JSON object"]),
    "key missing": ('{"query": "q", "choices": ["a", "b"]}', ["line 2", "'gold'", "query, choices, gold"]),
    "gold outside": (json.dumps(GOOD | {"gold": 2}), ["line 2", "'gold' is 2", "from 0 to 1"]),
    "gold negative": (json.dumps(GOOD | {"gold": -1}), ["line 2", "'gold' is -1"]),
    "gold boolean": (json.dumps(GOOD | {"gold": True}), ["line 2", "'gold' is true"]),
    "gold text": (json.dumps(GOOD | {"gold": "b"}), ["line 2", "'gold'"]),
    "one choice": (json.dumps(GOOD | {"choices": ["a"], "gold": 0}), ["line 2", "'choices'", "at least two"]),
    "blank choice": (json.dumps(GOOD | {"choices": ["a", " "]}), ["line 2", "'choices'", "not blank"]),
    "choice not text": (json.dumps(GOOD | {"choices": ["a", 3]}), ["line 2", "'choices'"]),
    "query not text": (json.dumps(GOOD | {"query": None}), ["line 2", "'query'"]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_lines_are_told_by_number(case: str, tmp_path: Path):
    line, words = MALFORMED[case]
    file = tmp_path / "task.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(InputError) as told:
        open_tasks([str(file)])
    for part in (*words, str(file)):
        assert part in str(told.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty", "query, choices, gold"]),
        (b"\n \n", ["empty"]),
        (b'{"text": "a"}\n', ["line 1", "keys text", "contexts, continuation, gold"]),
        (b'{"contexts": ["a"], "continuation": "b", "gold": 0}\n', ["line 1", "'contexts'", "at least two"]),
        (b'{"context": "a", "continuation": ""}\n', ["line 1", "'continuation'"]),
        (b'\xff\xfe{"a": 1}', ["UTF-8"]),
        (b'{"context": "a", "continuation": " b"}\n', ["begin with a space", "leave it out"]),
        (b'{"query": "a", "choices": ["b", " c"], "gold": 0}\n', ["begin with a space"]),
    ],
)
def test_unusable_files_are_told(content: bytes, words: list[str], tmp_path: Path):
    file = tmp_path / "task.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError) as told:
        open_tasks([str(file)])
    for part in words:
        assert part in str(told.value)


def test_wrong_calls_are_told(networks: dict[str, PreTrainedModel], tokenizer: Any, tmp_path: Path):
    file = write(tmp_path / "a.jsonl", [GOOD])
    for tasks, words in (
        ([file, file], "'a' is there twice"),
        (["paper", "piqa"], "'piqa' is there twice"),
        ([], "no tasks"),
        ([str(tmp_path / "none.jsonl")], "does not exist"),
        (["arc_eazy", file], "did you mean arc_easy"),
    ):
        with pytest.raises(InputError, match=words):
            open_tasks(tasks)
    for name in ("limit", "batch_size"):
        with pytest.raises(InputError, match=f"{name} is 0"):
            evaluate_tasks(networks["dense"], tokenizer, [file], **{name: 0})


def test_a_task_by_name(
    networks: dict[str, PreTrainedModel],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """lm-eval's lambada_openai itself, whose data lie in a folder that `datasets` prefers to the hub's of that name."""
    model = networks["dense"]
    local, hub = rows("greedy", model, tokenizer)
    folder = tmp_path / "EleutherAI" / "lambada_openai"
    folder.mkdir(parents=True)
    write(folder / "test.jsonl", hub)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    named, read = evaluate_tasks(
        model, tokenizer, ["lambada_openai", write(tmp_path / "local.jsonl", local)], batch_size=4
    ).tasks
    assert (named.task, named.source, named.version) == ("lambada_openai", "lm-eval", 1.0)
    assert (named.acc, named.acc_stderr, named.samples) == (read.acc, read.acc_stderr, LINES)
    # Its perplexity would be bootstrapped, with lines on both streams.
    assert capfd.readouterr() == ("", "")


def test_names_are_checked_and_data_that_cannot_be_fetched_are_told(monkeypatch: pytest.MonkeyPatch):
    known = _manager().all_subtasks  # kept between calls: reading it takes seconds
    assert [len(names) for names in PRESETS.values()] == [5, 11]
    assert [name for names in PRESETS.values() for name in names if name not in known] == []
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    for name in ("piqa", "gsm8k"):
        with pytest.raises(InputError, match=rf"task '{name}' cannot be fetched.*\.jsonl"):
            open_tasks([name])


def test_a_group_beside_its_member_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "allenai" / "ai2_arc"
    folder.mkdir(parents=True)
    choices = {"text": ["a", "b"], "label": ["A", "B"]}
    write(folder / "test.jsonl", [{"id": "1", "question": "?", "choices": choices, "answerKey": "A"}])
    splits = "".join(f"{{split: {split}, path: test.jsonl}}, " for split in ("train", "validation", "test"))
    file = f"  data_files: [{splits}]\n"
    configs = "".join(f"- config_name: {name}\n{file}" for name in ("ARC-Easy", "ARC-Challenge"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert sorted(task.name for task in open_tasks(["ai2_arc"])) == ["arc_challenge", "arc_easy"]
    with pytest.raises(InputError, match="'arc_easy'"):
        open_tasks(["arc_easy", "ai2_arc"])


def test_a_task_without_acc_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "openai" / "gsm8k"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        write(folder / f"{split}.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(InputError, match="'gsm8k' is scored by exact_match on generate_until"):
        open_tasks(["gsm8k"])


def test_a_missing_lm_eval_is_named(monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    with pytest.raises(MissingExtraError, match=r"lm-eval.*modegpt\[eval\]"):
        open_tasks(["piqa"])


def test_a_tokenizer_without_a_token_to_begin_with_is_told(
    networks: dict[str, PreTrainedModel], tokenizer: Any, tmp_path: Path
):
    dense = networks["dense"]
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = bare.eos_token = None
    source = write(tmp_path / "t.jsonl", rows("choices", dense, tokenizer)[0])
    with pytest.raises(InputError, match="neither a first nor a last token"):
        evaluate_tasks(dense, bare, [source])


def test_half_of_a_surrogate_pair_is_told_by_its_line(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"query": "q \\ud800", "choices": ["a", "b"], "gold": 0}\n')
    with pytest.raises(InputError, match="line 1 of task file"):
        open_tasks([str(path)])


def test_none_right_by_length_is_a_figure():
    task = TaskResult("a", "a", None, 0.5, 0.1, 0.0, 0.1, 4, 0, 0.0, {})
    assert _mean([task]).acc_norm == 0
