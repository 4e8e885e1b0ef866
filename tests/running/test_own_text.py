"""Coverage windows: the model writes them itself, and every source of blocks lets it write the same."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedTokenizerFast

from conformance.families import FAMILIES, Family
from modegpt import CompressionConfig, NumericalError
from modegpt.blocks import Calibration
from modegpt.compress import compress_to_folder, prepare
from modegpt.hidden_states import HiddenStates
from modegpt.running.distributed import Team
from modegpt.running.own_text import CACHE_BYTES, LENGTHS, Draft, Writer, beginning, cache_bytes, sample
from modegpt.running.run import Run

CPU = torch.device("cpu")


def calibration(vocab: int = 101) -> Tensor:
    return torch.randint(vocab, (6, 10), generator=torch.Generator().manual_seed(1))


def run_of(model: object, **settings: object) -> Run:
    return prepare(model, calibration(), CompressionConfig(device="cpu", **settings), None, None)  # type: ignore[arg-type]


def written_by(run: Run) -> Tensor:
    windows = run.coverage()
    assert windows is not None
    return windows


def written(model: object, **settings: object) -> Tensor:
    return written_by(run_of(model, **settings))


def expected(dense: torch.nn.Module, count: int, seed: int, start: int | None = None) -> Tensor:
    """The definition: continuations sampled from the model's own forward, by the same uniform numbers."""
    own = 10 - (start is not None)
    generator = torch.Generator().manual_seed(seed)
    windows = torch.full((count, 10), -1 if start is None else start)
    for place, length in enumerate(LENGTHS[:count]):
        into = windows[place :: len(LENGTHS), 10 - own :]
        uniforms = torch.rand(-(-into.numel() // length), length, generator=generator, dtype=torch.float64)
        tokens = (uniforms[:, :1] * dense.config.vocab_size).long()  # type: ignore[union-attr, operator]
        for step in range(1, length):
            inputs = tokens if start is None else torch.cat((torch.full_like(tokens[:, :1], start), tokens), dim=1)
            with torch.no_grad():
                chances = dense(inputs).logits[:, -1].double().softmax(-1)
            tokens = torch.cat((tokens, (chances.cumsum(-1) <= uniforms[:, step, None]).sum(-1, keepdim=True)), dim=1)
        into.copy_(tokens.flatten()[: into.numel()].view_as(into))
    return windows


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_text_is_sampled_with_and_without_a_cache(family: Family, monkeypatch: pytest.MonkeyPatch):
    """From shards it is the same: else a run from files would not give the bits of one in memory (test_run.py)."""
    dense = family.dense()
    windows = written(dense, coverage=0.5)
    assert torch.equal(windows, expected(dense, 3, seed=0))
    monkeypatch.setattr("modegpt.running.own_text.CACHE_BYTES", 0)
    assert torch.equal(written(dense, coverage=0.5), windows)


def blocks_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which each block is added that is asked for from here on."""
    read, peek = [], run.source.blocks.peek
    monkeypatch.setattr(run.source.blocks, "peek", lambda index, device: read.append(index) or peek(index, device))
    return read


@pytest.mark.parametrize("n_kept", [0, 1, 2])
def test_where_a_gpu_has_room_blocks_are_read_once(n_kept: int, monkeypatch: pytest.MonkeyPatch):
    """Its free memory is made believe, half of which is taken after so many blocks."""
    blocks = [nn.Linear(2, 2) for _ in range(3)]
    read: list[int] = []
    source = SimpleNamespace(peek=lambda index, device: read.append(index) or blocks[index])
    monkeypatch.setattr(
        "modegpt.running.own_text.free_gpu_memory_bytes", lambda device: 4 if len(read) <= n_kept else 2
    )
    writer = Writer(source, 3, None, None, Team(), torch.device("cuda"), True, None)  # type: ignore[arg-type]
    for index in (0, 1, 2, 0, 1, 2):
        assert writer._block(index) is blocks[index]
    assert read == [0, 1, 2, *range(n_kept, 3)]


@pytest.mark.parametrize(("n_kept", "limit"), [(0, None), (1, None), (2, None), (0, 10**9)])
def test_where_the_host_has_room_blocks_are_read_once(
    n_kept: int, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A limit of memory leaves none."""
    dense = FAMILIES[0].dense()
    dense.save_pretrained(tmp_path)
    run = run_of(str(tmp_path), coverage=0.5, max_host_memory=limit)
    read = blocks_read(run, monkeypatch)
    if limit is None:
        block = run.sizes[0].total * 4
        monkeypatch.setattr("modegpt.running.own_text.BLOCK_BYTES", n_kept * block + block // 2)
    assert torch.equal(written_by(run), expected(dense, 3, seed=0))
    n_steps = max(LENGTHS) - 1  # of both lengths together
    assert len(read) == n_steps * run.source.dims.n_layers - n_kept * (n_steps - 1)


def test_blocks_that_are_in_memory_anyway_count_nothing(monkeypatch: pytest.MonkeyPatch):
    run = run_of(FAMILIES[0].dense(), coverage=0.5)
    read = blocks_read(run, monkeypatch)
    monkeypatch.setattr("modegpt.running.own_text.BLOCK_BYTES", 0)
    run.coverage()
    assert read == list(range(run.source.dims.n_layers))


def test_continuations_begin_where_all_windows_begin():
    dense = FAMILIES[0].dense()
    begun = torch.cat((torch.full((6, 1), 7), calibration()[:, 1:]), dim=1)
    windows = prepare(dense, begun, CompressionConfig(device="cpu", coverage=0.5), None, None).coverage()
    assert windows is not None
    assert torch.equal(windows, expected(dense, 3, seed=0, start=7))
    assert beginning(begun[:1]) is None  # one window tells nothing
    assert beginning(calibration()) is None
    assert beginning(torch.full((4, 1), 5)) is None  # nothing would follow


def test_one_window_of_a_text_begins_as_the_text_does(
    tiny_tokenizer: PreTrainedTokenizerFast, small_text_file: Path, tmp_path: Path
):
    (dense,) = (family.dense() for family in FAMILIES if family.name == "gemma")
    dense.resize_token_embeddings(len(tiny_tokenizer))
    dense.save_pretrained(tmp_path)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.bos_token = "<|end|>"
    tokenizer.save_pretrained(tmp_path)
    made = []
    for samples in (1, 2):
        config = CompressionConfig(samples=samples, seq_len=10, device="cpu", coverage=1 / samples)
        made.append(prepare(tmp_path, small_text_file, config, None, None).coverage())
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], expected(dense, 1, seed=0, start=tokenizer.bos_token_id))


@pytest.mark.parametrize(("share", "count"), [(0.001, 1), (0.25, 2), (1.0, 6)])
def test_the_share_says_how_many_windows(share: float, count: int):
    windows = run_of(FAMILIES[0].dense(), coverage=share).coverage()
    assert windows is not None
    assert windows.shape == (count, 10)
    assert run_of(FAMILIES[0].dense(), coverage=0.0).coverage() is None


def test_the_seed_decides_and_the_global_state_is_left_alone():
    dense, state = FAMILIES[0].dense(), torch.get_rng_state()
    first, again, other = (written(dense, coverage=1.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_decide_nothing():
    dense = FAMILIES[0].dense()
    assert torch.equal(written(dense, coverage=1.0, batch_size=3), written(dense, coverage=1.0))


class Alone(Team):
    """One of several processes, whose share nobody adds to the others'."""

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor


class Copyist(Writer):
    """Writes what the uniform numbers say, and asks no model."""

    def _write(self, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            for step in range(1, draft.length):
                draft.add(step, (1000 * draft.uniforms[:, step]).long())


@pytest.mark.parametrize("seq_len", [16, 64])  # one and two rows of 16 tokens for one and four processes and eight
@pytest.mark.parametrize("size", [4, 8])
def test_processes_decide_nothing_even_where_some_have_nothing_to_write(size: int, seq_len: int):
    def share(rank: int, size: int) -> Tensor:
        team = Alone(rank, size)
        writer = Copyist(None, 1, None, None, team, CPU, True, lambda run, to_run: None)  # type: ignore[arg-type]
        return writer.windows(2, seq_len, None, 1000, seed=0)

    assert torch.equal(torch.stack([share(rank, size) for rank in range(size)]).sum(0), share(0, 1))


def seen_by_embed(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let a run write; return rows and tokens of what was embedded, the rows of a batch, and tokens in the cache."""
    embed, seen = run.source.blocks.embed, []

    def spy(windows: Tensor, batch_size: int, hidden: HiddenStates, cache: Cache | None = None) -> Calibration:
        seen.append((*windows.shape, batch_size, -1 if cache is None else cache.get_seq_length()))
        return embed(windows, batch_size, hidden, cache)

    monkeypatch.setattr(run.source.blocks, "embed", spy)
    run.coverage()
    return seen


def test_each_token_is_run_once_if_keys_and_values_fit(monkeypatch: pytest.MonkeyPatch):
    run, told = run_of(FAMILIES[0].dense(), coverage=0.5), []
    run.progress = lambda *call: told.append(call)
    shorter = [(3, 1, 3, length) for length in range(3)]  # one window of ten tokens in pieces of four
    longer = [(2, 1, 2, length) for length in range(15)]  # two in pieces of sixteen
    steps = [step for both in zip(longer, shorter, strict=False) for step in both] + longer[3:]
    assert seen_by_embed(run, monkeypatch) == steps
    total = 15 * run.source.dims.n_layers
    assert told == [("coverage", done, total) for done in range(total + 1)]


@pytest.mark.parametrize(("limit", "short", "cached"), [(None, 0, True), (None, 1, False), (10**9, 0, False)])
def test_without_room_steps_run_all_that_is_written(
    limit: int | None, short: int, cached: bool, monkeypatch: pytest.MonkeyPatch
):
    """A limit of memory leaves none. A batch of short rows holds as many tokens as one of windows."""
    run = run_of(FAMILIES[0].dense(), coverage=0.01, batch_size=2, max_host_memory=limit)
    dims = run.source.dims
    needed = 15 * 2 * dims.n_layers * dims.n_kv_heads * dims.d_head * 4  # by one continuation, for ten tokens
    monkeypatch.setattr("modegpt.running.own_text.CACHE_BYTES", needed - short)
    steps = [(1, 1, 1, n) if cached else (1, n + 1, 20 // (n + 1), -1) for n in range(15)]
    assert seen_by_embed(run, monkeypatch) == steps


def test_what_has_room_is_cached_and_the_rest_is_not():
    run = run_of(FAMILIES[0].dense())
    dims = run.source.dims
    token = 2 * dims.n_layers * dims.n_kv_heads * dims.d_head * 4
    room = CACHE_BYTES // token
    for asked, fitting in (((room, 1), (room, 0)), ((room + 1, 1), (0, 1)), ((1, room - 1), (1, room - 1))):
        assert cache_bytes(run.source, asked, CPU, spare=True) == [count * token for count in fitting]
    assert cache_bytes(run.source, (1, 1), CPU, spare=False) == [0, 0]


def test_without_room_for_all_rows_in_a_batch_there_is_no_cache(monkeypatch: pytest.MonkeyPatch):
    run = run_of(FAMILIES[0].dense(), coverage=1.0, batch_size=1)
    monkeypatch.setattr("modegpt.running.own_text.LENGTHS", (4,))
    # Fifteen continuations; a batch has five of them, as each may have a token before it.
    assert seen_by_embed(run, monkeypatch) == [(15, 1, 10, -1), (15, 2, 5, -1), (15, 3, 3, -1)]


def test_rows_are_drawn_for_alike_however_many_are_cumulated_at_once(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 300, generator=generator)
    uniforms = torch.rand(50, dtype=torch.float64, generator=generator)
    together = sample(logits, uniforms)
    for numbers in (1, 600, 50 * 300 - 1):  # a row at a time, two, and all but one
        monkeypatch.setattr("modegpt.running.own_text.CUMULATED", numbers)
        assert torch.equal(sample(logits, uniforms), together)


def test_sampling_gives_each_token_its_probability():
    chances = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125, 0.0])
    logits = chances.clamp_min(1e-45).log().where(chances > 0, torch.tensor(-1e4))
    uniforms = torch.arange(1000, dtype=torch.float64) / 1000  # 0 is in it: token 1 must not come before token 0
    drawn = sample(logits.expand(1000, -1), uniforms)
    # Softmax in float32 moves each boundary by 1e-7 at most, on which at most one of the numbers lies.
    torch.testing.assert_close(drawn.bincount(minlength=6) / 1000, chances, rtol=0, atol=0.001)
    assert sample(logits[None], torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 4
    with pytest.raises(NumericalError, match="NaN or infinity as logits"):
        sample(logits[None] / 0, torch.zeros(1, dtype=torch.float64))


def test_a_resumed_run_takes_the_windows_that_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dense, out = FAMILIES[0].dense(), tmp_path / "out"
    dense.save_pretrained(tmp_path / "dense")

    class StopError(Exception):
        """Ends the run from outside."""

    def stop_at(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("compress", 1):
            raise StopError

    settings = CompressionConfig(sparsity=0.3, device="cpu")
    with pytest.raises(StopError):
        compress_to_folder(str(tmp_path / "dense"), calibration(), out, settings, progress=stop_at)
    kept = tmp_path / "out.partial" / "coverage.json"
    assert torch.equal(torch.tensor(json.loads(kept.read_text())["values"]), run_of(dense).coverage())
    monkeypatch.setattr(Run, "coverage", lambda run: pytest.fail("the windows are there"))
    compress_to_folder(str(tmp_path / "dense"), calibration(), out, settings, resume=True)
    assert (out / "model.safetensors").is_file()
