import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float64
from oracles import GAUSSIAN_TOLERANCE, ROUNDING, normal, properties, seeds, states
from torch import Tensor

from modegpt.decompose import NotPositiveDefiniteError
from modegpt.decompose.products import product_svd

D_HEAD, N_HEADS, N_TOKENS = 5, 4, 40
ranks = st.integers(1, D_HEAD)
key_heads = st.sampled_from([1, 2, 4])


def problem(seed, n_kv_heads=2, n_tokens=N_TOKENS):
    """Queries `(n_kv_heads, per_group, n_tokens, d_head)` and keys `(n_kv_heads, n_tokens, d_head)`."""
    q = torch.stack([states(seed + h, N_TOKENS, D_HEAD) for h in range(N_HEADS)])
    k = torch.stack([states(seed + 50 + g, n_tokens, D_HEAD) for g in range(n_kv_heads)])
    return q.unflatten(0, (n_kv_heads, -1)), k


def moments(q, k):
    return (q.mT @ q).flatten(0, 1), k.mT @ k


@properties
@given(seeds, ranks, key_heads)
def test_the_logits_are_the_truncated_svd_of_those_of_the_group(seed, rank, n_kv_heads):
    q, k = problem(seed, n_kv_heads)
    result = product_svd(*moments(q, k), rank)
    assert isinstance(result.query, Float64[Tensor, f"{n_kv_heads} {D_HEAD} {rank}"])
    assert isinstance(result.key, Float64[Tensor, f"{n_kv_heads} {D_HEAD} {rank}"])
    stacked = q.flatten(1, 2)
    dense = stacked @ k.mT
    U, Sigma, Vt = torch.linalg.svd(dense, full_matrices=False)
    best = (U[..., :rank] * Sigma[..., None, :rank]) @ Vt[..., :rank, :]
    ours = stacked @ result.query @ (k @ result.key).mT
    torch.testing.assert_close(ours, best, rtol=1e-8, atol=1e-7)  # logits of size ten to a hundred
    lost = Sigma[..., rank:].square().sum() / Sigma.square().sum()
    # The discarded energy is a sum of eigenvalues, exact to n · eps of the largest.
    assert result.error**2 == pytest.approx(lost.item(), rel=1e-8, abs=1e-14)


@properties
@given(seeds, ranks)
def test_the_key_map_is_orthonormal_and_its_signs_are_fixed(seed, rank):
    key = product_svd(*moments(*problem(seed)), rank).key
    torch.testing.assert_close(key.mT @ key, torch.eye(rank, dtype=torch.float64).expand(2, -1, -1), **ROUNDING)
    assert bool((key.gather(-2, key.abs().argmax(-2, keepdim=True)) > 0).all())


@properties
@given(seeds, ranks)
def test_mapping_heads_by_a_matrix_and_its_inverse_changes_no_logit(seed, rank):
    q, k = problem(seed)
    # Singular values from 1/2 to 2: rounding grows by 4² at most.
    turn = torch.linalg.svd(normal(seed + 3, D_HEAD, D_HEAD))
    mixed = turn.U @ torch.logspace(-1, 1, D_HEAD, base=2, dtype=torch.float64).diag() @ turn.Vh
    plain = product_svd(*moments(q, k), rank)
    moved = product_svd(*moments(q @ mixed, k @ torch.linalg.inv(mixed).T), rank)
    before = q @ (plain.query @ plain.key.mT)[:, None] @ k[:, None].mT
    after = q @ mixed @ (moved.query @ moved.key.mT)[:, None] @ (k @ torch.linalg.inv(mixed).T)[:, None].mT
    torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-7)  # logits of size ten to a hundred
    assert moved.error == pytest.approx(plain.error, rel=1e-8, abs=1e-7)


@properties
@given(seeds, key_heads)
def test_full_rank_gives_every_logit_even_of_keys_never_seen(seed, n_kv_heads):
    q, k = problem(seed, n_kv_heads)
    result = product_svd(*moments(q, k), D_HEAD)
    eye = torch.eye(D_HEAD, dtype=torch.float64).expand(n_kv_heads, -1, -1)
    torch.testing.assert_close(result.query @ result.key.mT, eye, **GAUSSIAN_TOLERANCE)
    assert result.error == pytest.approx(0, abs=1e-7)


@properties
@given(seeds, ranks, st.sampled_from([1, 2, 3]))
def test_fewer_keys_than_dims(seed, rank, n_tokens):
    q, k = problem(seed, n_tokens=n_tokens)
    result = product_svd(*moments(q, k), rank)
    dense = q @ k[:, None].mT
    ours = q @ result.query[:, None] @ (k @ result.key)[:, None].mT
    measured = ((dense - ours).norm() / dense.norm()).item()
    assert result.error == pytest.approx(measured, abs=1e-6)  # root of eps
    if rank >= n_tokens:
        assert measured == pytest.approx(0, abs=1e-6)
    eye = torch.eye(rank, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(result.key.mT @ result.key, eye, **ROUNDING)


@pytest.mark.parametrize("which", [0, 1])
def test_queries_or_keys_that_are_all_zero(which):
    inputs = list(moments(*problem(4)))
    inputs[which] = torch.zeros_like(inputs[which])
    result = product_svd(*inputs, 2)
    assert result.error == 0
    assert bool(torch.isfinite(result.query).all())
    eye = torch.eye(2, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(result.key.mT @ result.key, eye, **ROUNDING)


def test_inputs_are_not_mutated():
    query, key = moments(*problem(5))
    before = query.clone(), key.clone()
    product_svd(query, key, 3)
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(which, bad):
    inputs = moments(*problem(6))
    inputs[which][1, 2, 2] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        product_svd(*inputs, 2)
