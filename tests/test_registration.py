"""`import modegpt` tells transformers of the compressed classes, and leaves out what most runs do not need."""

import pickle
from pathlib import Path

import pytest

from conformance.helpers import run_python
from modegpt.modeling_modegpt import compressed_class


def test_importing_it_imports_no_familys_models_and_no_lm_eval(tmp_path: Path):
    code = "import sys, modegpt; modegpt.evaluate_tasks; print(*sys.modules)"
    imported = run_python("-c", code, cache=tmp_path).split()
    assert "transformers.models.llama.configuration_llama" in imported
    models = [name for name in imported if name.startswith("transformers.models.") and ".modeling_" in name]
    assert [name for name in models if ".auto." not in name] == []
    assert "lm_eval" not in imported


@pytest.mark.parametrize(
    "origin", ["pickle.load(open('config', 'rb'))", "modegpt.modeling_modegpt.ModegptLlamaConfig()"]
)
def test_the_models_are_known_once_there_is_a_config(origin: str, tmp_path: Path):
    (tmp_path / "config").write_bytes(pickle.dumps(compressed_class("LlamaConfig")()))
    code = f"import pickle, modegpt, transformers; config = {origin}\n"
    code += "autos = (transformers.AutoModel, transformers.AutoModelForCausalLM, "
    code += "transformers.AutoModelForSequenceClassification)\n"
    code += "print([auto._model_mapping[type(config)].__name__ for auto in autos])"
    names = ["ModegptLlamaModel", "ModegptLlamaForCausalLM", "ModegptLlamaForSequenceClassification"]
    assert run_python("-c", code, cache=tmp_path) == f"{names}\n"
