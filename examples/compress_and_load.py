"""Compress a model from Python, save it, load it back and let it write: python examples/compress_and_load.py MODEL OUT.

MODEL is a hub name, a folder or a .gguf file; OUT is a folder that does not exist yet.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import modegpt


def main(model: str, out: str) -> None:
    """Compress `model` into `out`, load what was written and continue a sentence with it."""
    config = modegpt.CompressionConfig(sparsity=0.2, samples=32, seq_len=128)
    compressed = modegpt.compress(model, "python-docs", config, out=out)
    print(f"removed {compressed.modegpt_report['sparsity']['blocks']:.1%} of the decoder blocks' parameters")

    loaded = AutoModelForCausalLM.from_pretrained(out)  # importing modegpt has registered the compressed classes
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer("The list type in Python is", return_tensors="pt", return_token_type_ids=False)
    print(tokenizer.decode(loaded.generate(**prompt, max_new_tokens=20, do_sample=False)[0]))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
