"""What tools around transformers ask of a model by its name, its plans and its files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from .conftest import Pair
from .families import tokens

HEADS: tuple[Any, ...] = (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
)


class Rows(Dataset):
    """Token ids that are their own labels."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@pytest.mark.parametrize("auto", HEADS, ids=lambda auto: auto.__name__)
def test_other_heads_read_the_compressed_model(covered: Pair, folders: dict[str, Path], auto: Any, tmp_path: Path):
    folder, ids = folders[covered.family.name], tokens(rows=2, length=9)
    if type(covered.compressed.config) not in auto._model_mapping:
        pytest.skip("transformers has no such head for the family, or one that reads no causal checkpoint")
    model = auto.from_pretrained(folder).eval()
    expected = AutoModel.from_pretrained(folder).eval()(ids).last_hidden_state
    torch.testing.assert_close(model.base_model(ids).last_hidden_state, expected)
    model.config.pad_token_id = 0
    outputs = model(ids)
    (outputs.logits if hasattr(outputs, "logits") else outputs.start_logits).sum().backward()
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_the_trainer_shifts_labels_when_it_smooths_them(covered: Pair, tmp_path: Path):
    """With a smoothing that rounds to nothing, its own loss is to the model's what it is for the dense model.

    That is the same but for GPT-2, where it counts the last label, too.
    """
    ids = tokens(rows=4, length=12)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], label_smoothing_factor=1e-9, use_cpu=True, disable_tqdm=True,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    ratios = [
        Trainer(model=model, args=arguments, eval_dataset=Rows(ids)).evaluate()["eval_loss"]
        / model(ids, labels=ids).loss.item()
        for model in (covered.compressed, covered.dense)
    ]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)


def test_no_part_of_a_model_is_sharded_by_a_plan_for_heads_of_one_size(pair: Pair):
    """Nor its head alone, which may be tied to the embedding."""
    config = pair.compressed.config
    assert config.base_model_tp_plan is None
    assert config.base_model_pp_plan is None
    assert not type(pair.compressed)._tp_plan
    assert config.base_model_fsdp_plan == pair.dense.config.base_model_fsdp_plan


def test_what_is_uploaded_holds_the_code(pairs: dict[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The stock method uploads the folder at its end, so the file must be there before it begins."""
    seen: list[set[str]] = []
    stock = PreTrainedModel.save_pretrained

    def record(model: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
        stock(model, folder, *args, **kwargs)
        seen.append({path.name for path in Path(folder).iterdir()})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", record)
    pairs["llama-tied"].compressed.save_pretrained(tmp_path / "a", True)
    assert {"config.json", "model.safetensors", "modeling_modegpt.py"} <= seen[0]
    pairs["llama-tied"].compressed.save_pretrained(tmp_path / "b", is_main_process=False)
    assert "modeling_modegpt.py" not in seen[1]
