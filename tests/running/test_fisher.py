"""What the logits feel of a neuron: the gradients behind the last block, the sums over tokens, the scores."""

import itertools
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import modegpt
from conformance.families import FAMILIES, Family, among_covering, tokens
from modegpt.architectures import architecture_of
from modegpt.blocks import BlockSource, Calibration, PrefetchedBlocks, advance, run_block
from modegpt.config import CompressionConfig
from modegpt.hidden_states import HiddenStates
from modegpt.modeling_modegpt import decoder_layers
from modegpt.moments import BlockMoments
from modegpt.running.fisher import EVERY, FisherProbe, draw_seed, fisher_noise, stride
from modegpt.running.source import Source, open_source
from modegpt.solvers.mlp import felt_by_logits
from modegpt.sums.token_weights import token_weights

CPU = torch.device("cpu")
ADDING = [family for family in FAMILIES if family.architecture.adds_mlp and not family.dims.n_experts]
covered = pytest.mark.parametrize("family", among_covering(FAMILIES), ids=lambda family: family.name)


def embedded(blocks: BlockSource, windows: Tensor) -> Calibration:
    return blocks.embed(windows, 3, HiddenStates())


def opened(model: object, windows: Tensor) -> tuple[Source, Calibration]:
    source = open_source(model, CPU)  # type: ignore[arg-type]
    calibration = embedded(source.blocks, windows)
    weights = token_weights(windows, 0.25)
    assert weights is not None
    calibration.weights = weights.split(3)
    return source, calibration


def test_the_noise_has_the_fisher_information_as_covariance():
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0))
    n = 200_000
    noise = fisher_noise(logits.expand(n, 7), seed=3).double()
    p = logits.double().softmax(-1)
    expected = torch.diag(p) - torch.outer(p, p)
    # The product of two Gaussian numbers has a standard deviation of at most √(2 F_ii F_jj); six of the mean's.
    bound = 6 * (2 * torch.outer(expected.diagonal(), expected.diagonal()) / n).sqrt()
    assert bool(((noise.T @ noise / n - expected).abs() <= bound).all())
    assert float(noise.sum(-1).abs().max()) < 1e-5  # float32 sums of numbers up to 3
    assert torch.equal(fisher_noise(logits[None], 3), fisher_noise(logits[None], 3))
    assert not torch.equal(fisher_noise(logits[None], 3), fisher_noise(logits[None], 4))


@covered
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_pulled_back_is_the_slope_of_the_logits(family: Family, inference: bool):
    """Against central differences of the logits, with final norm, caps and scales of the family."""
    source = open_source(family.dense().double(), CPU)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(5, family.dims.d_model, generator=generator, dtype=torch.float64)
    step = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(5, family.dense().config.vocab_size, generator=generator)

    def logits(states: Tensor) -> Tensor:
        return next(iter(source.blocks.logits([states]))).double()

    size = 1e-2  # the logits come in float32: their rounding over the step, and its square, are both some 1e-4
    slope = ((logits(rows + size * step) - logits(rows - size * step)) / (2 * size) * weights).sum(-1)
    with torch.inference_mode(inference):
        pulled = next(iter(source.blocks.pull_back([rows], lambda _logits: weights)))
    scale = (pulled.double() * step).abs().sum(-1)
    assert bool((((pulled.double() * step).sum(-1) - slope).abs() <= 2e-3 * scale).all())
    assert not pulled.requires_grad


def probe_of(source: Source, numbers: Tensor, every: int = EVERY) -> FisherProbe:
    peek = partial(source.blocks.peek, device=CPU)
    return FisherProbe(source.blocks, peek, source.dims.n_layers, numbers, CPU, seed=5, every=every)


def felt(source, calibration: Calibration, numbers: Tensor, every: int = EVERY) -> list[Tensor]:
    """The sums of every block, with the blocks run in order beside the probe."""
    probe, totals = probe_of(source, numbers, every), []
    for index in range(source.dims.n_layers):
        block = source.blocks.peek(index, CPU)
        assert probe.reaches(index)
        total = BlockMoments.zeros(source.block_dims(index), ["fisher"])["fisher"]
        probe.take(block, index, calibration)
        recorded = probe.record(block, source.architecture, calibration, total)
        with recorded if source.architecture.has_mlp(block) else nullcontext():
            advance(block, index, calibration, CPU)
        totals.append(total)
    return totals


@pytest.mark.parametrize(("every", "first"), [(EVERY, 0), (11, 4)])
@pytest.mark.parametrize("family", among_covering(ADDING), ids=lambda family: family.name)
def test_the_sums_are_those_of_the_dense_model_s_own_gradients(family: Family, every: int, first: int):
    windows = tokens(rows=5, length=20)
    source, calibration = opened(family.dense(), windows)
    assert calibration.weights is not None
    weights = torch.cat(list(calibration.weights))
    totals = felt(source, calibration, torch.arange(5), every)

    probed = slice(first, None, every)
    dense = family.dense()
    layers = source.blocks.layers
    windowwise = []
    for number in range(5):
        states = list(run_layers(source, embedded(source.blocks, windows[number, None])))
        last = states[-1][1][0, probed].clone().requires_grad_()
        # One token a row: behind the blocks nothing mixes them.
        log_p = dense_logits(dense, last)
        noise = fisher_noise(log_p.detach().float(), draw_seed(5, number, 0))
        windowwise.append(([read for read, _output in states], *torch.autograd.grad(log_p, last, noise)))
    for index, total in enumerate(totals):
        if index in family.whole_mlps:
            continue
        expected = torch.zeros_like(total)
        down = source.architecture.projection(layers[index], "down")
        columns = (down.weight if down.weight.shape[0] == source.dims.d_model else down.weight.T).detach()
        for number, (reads, root) in enumerate(windowwise):
            z = reads[index][0, probed]
            if source.architecture.output_norm(layers[index]) is not None:
                root = before_norm(source, layers[index], z, root)
            effect = weights[number, probed, None] * (root @ columns).square().double()
            expected += torch.stack([(effect * z.double() ** power).sum(0) for power in (2, 1, 0)])
        # float32 forward and backward passes over batches of other sizes.
        torch.testing.assert_close(total, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().mean()))
        assert float(total[0].max()) > 0


def before_norm(source, block, z: Tensor, root: Tensor) -> Tensor:
    """A gradient behind `γ ∘ y/ρ`, the RMS norm of an MLP's output `y`, as it is before it."""
    y = source.architecture.projection(block, "down")(z).detach()
    norm = source.architecture.output_norm(block)
    rho = (y.square().mean(-1, keepdim=True) + source.config.rms_norm_eps).sqrt()
    gained = root * norm(torch.ones_like(y[0])).detach() * (1 + source.config.rms_norm_eps) ** 0.5
    return gained / rho - y * (y * gained).mean(-1, keepdim=True) / rho**3


def run_layers(source, calibration: Calibration):
    """What each block's down projection reads, None where it has none, and what the block puts out, of one batch."""
    for index in range(source.dims.n_layers):
        block, read, hooks = source.blocks.peek(index, CPU), [], []
        if source.architecture.has_mlp(block):
            down = source.architecture.projection(block, "down")
            hooks = [down.register_forward_pre_hook(lambda _m, inputs, read=read: read.append(inputs[0]))]
        (output,) = run_block(block, index, calibration, CPU)
        for hook in hooks:
            hook.remove()
        calibration.hidden[0] = output
        yield read[0].view(1, -1, read[0].shape[-1]) if read else None, output


def dense_logits(dense, last: Tensor) -> Tensor:
    """The model's logits with its last block's output replaced."""
    final = decoder_layers(dense, architecture_of(dense.config).describe())[-1]

    def replace(_module, _inputs, output):
        return (last[:, None], *output[1:]) if isinstance(output, tuple) else last[:, None]

    handle = final.register_forward_hook(replace)
    try:
        return dense(input_ids=torch.zeros(len(last), 1, dtype=torch.long), use_cache=False).logits[:, -1]
    finally:
        handle.remove()


def test_processes_and_shards_see_the_same_as_one_model_in_memory(tmp_path: Path):
    family = FAMILIES[0]
    windows, numbers = tokens(rows=7, length=20), torch.arange(7)
    family.dense().save_pretrained(tmp_path, max_shard_size="20KB")
    source, calibration = opened(family.dense(), windows)
    assert calibration.weights is not None
    weights = torch.cat(list(calibration.weights))
    expected = felt(source, calibration, numbers)
    streamed, calibration = opened(str(tmp_path), windows)
    assert all(map(torch.equal, felt(streamed, calibration, numbers), expected))
    shared = [torch.zeros_like(total) for total in expected]
    for rank in range(3):
        calibration = embedded(source.blocks, windows[rank::3])
        calibration.weights = weights[rank::3].split(3)
        for total, part in zip(shared, felt(source, calibration, numbers[rank::3]), strict=True):
            total += part
    for total, whole in zip(shared, expected, strict=True):  # float32 passes over batches of other sizes
        torch.testing.assert_close(total, whole, rtol=1e-3, atol=1e-3 * float(whole.abs().mean()))


def test_windows_are_drawn_for_alike_however_many_go_through_the_head_together(monkeypatch: pytest.MonkeyPatch):
    windows, numbers = tokens(rows=7, length=40), torch.arange(7)  # six rows each
    source, calibration = opened(FAMILIES[0].dense(), windows)
    together = felt(source, calibration.copy(), numbers)
    monkeypatch.setattr("modegpt.running.fisher.ROWS", 6)
    for total, alone in zip(together, felt(source, calibration.copy(), numbers), strict=True):
        # float32 products of other sizes
        torch.testing.assert_close(total, alone, rtol=1e-3, atol=1e-3 * float(alone.abs().mean()))
    monkeypatch.setattr("modegpt.running.fisher.ROWS", 20)  # three windows, three, and the last
    seen = []
    pull_back = source.blocks.pull_back
    monkeypatch.setattr(
        source.blocks,
        "pull_back",
        lambda states, draw: pull_back((seen.append(len(rows)) or rows for rows in states), draw),
    )
    felt(source, calibration, numbers)
    assert seen == [18, 18, 6]


@pytest.mark.parametrize(
    ("head", "blocks", "seq_len", "every"),
    [
        (49152 * 576, 106_200_000, 512, EVERY),  # SmolLM2-135M
        (262144 * 640, 100_300_000, 512, 43),  # Gemma 3 270M: its head is larger than all its blocks
        (262144 * 640, 100_300_000, 256, 31),
        (262144 * 640, 100_300_000, 32, EVERY),
        (151936 * 896, 357_900_000, 512, 11),  # Qwen2.5-0.5B
        (128256 * 4096, 6_979_000_000, 2048, EVERY),  # Llama 3 8B
    ],
)
def test_a_large_head_is_asked_about_fewer_tokens(head: int, blocks: int, seq_len: int, every: int):
    assert stride(head, blocks, seq_len) == every
    n_probed = len(range(every - EVERY, seq_len, every))
    assert n_probed >= 8 or every == EVERY


def test_a_later_start_takes_the_same():
    """A run that is resumed in the midst of the last blocks."""
    source, calibration = opened(FAMILIES[0].dense(), tokens(rows=6, length=20))
    numbers = torch.arange(6)
    whole = felt(source, calibration.copy(), numbers)
    advance(source.blocks.peek(0, CPU), 0, calibration, CPU)
    probe, block = probe_of(source, numbers), source.blocks.peek(1, CPU)
    total = torch.zeros_like(whole[1])
    probe.take(block, 1, calibration)
    with probe.record(block, source.architecture, calibration, total):
        advance(block, 1, calibration, CPU)
    assert torch.equal(total, whole[1])


def test_a_block_that_was_fetched_ahead_is_peeked_at_where_it_is():
    """As on a GPU, where the next block has left the model already when the probe runs on to its end."""
    source = open_source(FAMILIES[0].dense(), CPU)
    blocks, ahead = PrefetchedBlocks(source.blocks, CPU, source.dims.n_layers), Future()
    ahead.set_result(source.blocks.take(1, CPU))
    blocks._next = (1, ahead)
    assert blocks.peek(1) is ahead.result()
    assert blocks.peek(2) is source.blocks.peek(2, CPU)


@pytest.mark.parametrize("bias", [False, True])
def test_what_varies_of_a_neuron_is_felt_times_the_share_that_others_do_not_make_up_for(bias: bool):
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(50, 6, generator=generator, dtype=torch.float64) + 1
    z[:, 4] = 0  # a dead neuron
    effect = torch.rand(50, 6, generator=generator, dtype=torch.float64)
    down = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    scores = torch.rand(6, generator=generator, dtype=torch.float64)
    sums = {"mlp": z.T @ z, "fisher": torch.stack([(effect * z**power).sum(0) for power in (2, 1, 0)])}
    if bias:
        sums["mlp_sum"] = z.sum(0)
    centre = z.mean(0) if bias else torch.zeros(6, dtype=torch.float64)
    energy = (z - centre).square().sum(0) * down.square().sum(0)
    expected = (effect * (z - centre).square()).sum(0) * scores / energy
    expected[4] = 0
    torch.testing.assert_close(felt_by_logits(BlockMoments(sums, n_tokens=50), scores, energy), expected)


def test_parts_of_a_window_are_drawn_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modegpt.running.fisher.ROWS", 2)
    drawn: list[int] = []

    def noise(logits: Tensor, seed: int) -> Tensor:
        drawn.append(seed)
        return fisher_noise(logits, seed)

    monkeypatch.setattr("modegpt.running.fisher.fisher_noise", noise)
    felt(*opened(FAMILIES[0].dense(), tokens(rows=3, length=40)), torch.arange(3))
    assert len(set(drawn)) == len(drawn) == 9


def test_a_run_draws_by_its_seed(monkeypatch: pytest.MonkeyPatch):
    seeds: list[int] = []
    monkeypatch.setattr(
        "modegpt.running.fisher.draw_seed", lambda seed, *place: seeds.append(seed) or draw_seed(seed, *place)
    )
    modegpt.compress(FAMILIES[0].dense(), tokens(rows=3, length=20), CompressionConfig(seed=7, coverage=0))
    assert seeds == [7] * 3


def test_every_seed_draws_other_noise():
    """On a CPU, too, whose generator reads 32 bits of a seed alone."""
    logits = torch.randn(3, 50)
    every = itertools.product((0, 5, 6), (0, 1), (0, 1))
    draws = [fisher_noise(logits, draw_seed(seed, number, part)) for seed, number, part in every]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(draws, 2))
