"""The table of exported models."""

from typing import Any

from markdown_tables import first_draw, load, risen, section, table


@section("stock.json")
def stock(data: dict[str, Any]) -> str:
    """Return the section on one MLP width, and on llama.cpp."""
    about, dense, *rows = data["protocol"], *data["rows"]
    engine, uniform = about["llama_cpp"], _uniform()
    header = ["asked for", "of the blocks removed", "MLP width", "perplexity", "with `uniform`"]
    header += ["GGUF", "perplexity in it", "prompts, times faster", "decoding"] if engine else []
    lines = []
    for row in (dense, *rows):
        cells = [f"{row['sparsity']:.0%}" if row is not dense else "dense"]
        cells.append(f"{row['achieved']['blocks']:.1%}" if row is not dense else "")
        cells += [f"{row['mlp_width']:,}", _risen(row["perplexity"], dense, row is dense)]
        cells.append(_risen(uniform[row["sparsity"]], dense) if row["sparsity"] in uniform else "")
        if engine:
            ours, theirs = row["llama_cpp"], dense["llama_cpp"]
            cells += [f"{row['gguf_bytes'] / 1e6:.0f} MB", f"{ours['perplexity']:.1f}"]
            cells += [f"{ours[key] / theirs[key]:.2f}" for key in ("prompt_tokens_per_s", "decode_tokens_per_s")]
        lines.append(cells)
    told = (
        f"**What other engines can hold.** SmolLM2-135M-Instruct, `{about['solver']}`, `--allocation width` in "
        f"{about['allocation'].partition(', ')[2]}, exported;\n{about['dtype']}, calibrated on {about['calibration']}; "
        f"perplexity on {about['test']}\nin transformers' own class, and the rise of its logarithm"
    )
    if engine:
        told += (
            f". In llama.cpp ({engine['weights']}, llama-cpp-python {engine['version']},\n"
            f"{data['machine']['threads']} threads): perplexity on the {engine['perplexity']}, prompts of "
            f"{engine['prompt']} tokens, {engine['decoded']} decoded, in turn,\nmedians of {engine['rounds']} rounds"
        )
    return f"{told} (`benchmarks/stock.py`).\n\n{table(header, lines)}"


def _uniform() -> dict[float, float]:
    """Return the perplexities of `best` with `uniform` ranks, all modules, under the same protocol."""
    data = load("solvers.json")
    rows = [] if data is None else first_draw(data)[1:]
    return {
        row["sparsity"]: row["perplexity"]
        for row in rows
        if (row["method"], row.get("allocation"), row.get("modules")) == ("best", "uniform", "all")
    }


def _risen(perplexity: float, dense: dict[str, Any], itself: bool = False) -> str:
    if itself:
        return f"{perplexity:.1f}"
    return risen(perplexity, dense["perplexity"])
