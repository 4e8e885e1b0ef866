"""Opens saved folders in a process of its own: `fresh_process.py installed|shipped FOLDERS OUT`.

`installed` imports modegpt; `shipped` makes modegpt impossible to import and trusts the code in the checkpoint. For
each folder in FOLDERS, `OUT/<name>.pt` gets the logits and `OUT/<name>/` the model and tokenizer, saved again.
"""

import importlib
import sys
from pathlib import Path


def main(way: str, folders: Path, out: Path) -> None:
    if way == "shipped":
        sys.modules["modegpt"] = None  # pyright: ignore[reportArgumentType] - this is how Python marks "not importable"
    else:
        importlib.import_module("modegpt")
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
    from transformers.utils import logging

    # All folders hold the same code, and what it imports takes as long to find, five times for each, as all the rest.
    get_imports, found = dynamic_module_utils.get_imports, {}

    def get_imports_once(file: str) -> list[str]:
        code = Path(file).read_bytes()
        if code not in found:
            found[code] = get_imports(file)
        return found[code]

    dynamic_module_utils.get_imports = get_imports_once

    trust = {"trust_remote_code": True} if way == "shipped" else {}
    torch.set_num_threads(1)
    for folder in sorted(folders.iterdir()):
        tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
        ids = torch.tensor([tokenizer(" ".join(f"w{n}" for n in range(3, 23)))["input_ids"]])
        config = AutoConfig.from_pretrained(folder, **trust)
        # From the config as loaded too: this is what a training script hands over after changing a field.
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, **trust)
        bare = AutoModelForCausalLM.from_config(config, **trust)
        with torch.no_grad():
            inside = model.model if model.base_model is model else model.base_model  # Llama 4 names it otherwise
            logits, hidden = model(ids).logits, inside(ids).last_hidden_state
        assert [p.shape for p in bare.parameters()] == [p.shape for p in model.parameters()]
        expected = "modegpt.modeling_modegpt" if way == "installed" else "transformers_modules."
        assert all(type(made).__module__.startswith(expected) for made in (config, model, bare)), type(model)
        torch.save({"ids": ids, "logits": logits}, out / f"{folder.name}.pt")
        model.save_pretrained(out / folder.name)
        tokenizer.save_pretrained(out / folder.name)

        # Of an untied checkpoint the stock base models report, too, that they leave the head out.
        logging.set_verbosity_error()
        base = AutoModel.from_pretrained(folder, **trust)
        logging.set_verbosity_warning()
        assert type(base).__module__.startswith(expected)
        with torch.no_grad():
            assert torch.equal(base(ids).last_hidden_state, hidden)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
