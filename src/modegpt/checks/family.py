"""Whether the description of a family is true of its stock model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..around_blocks import named_arguments
from ..modeling_modegpt import decoder_layers
from .densify import densify
from .subject import Subject, distance, logits, run_hooked, verdict


def sparsity_zero(subject: Subject) -> tuple[str, str]:
    """Compress to full ranks, and compare with the dense model."""
    whole, expected = subject.compress(subject.ids, 0.0), logits(subject.dense, subject.ids)
    return verdict(
        distance(logits(whole, subject.ids), expected),
        subject.allowed(expected),
        "with nothing removed the model computes what it did",
        "with nothing removed it already computes something else: the family's description is wrong",
    )


def zeroed(subject: Subject) -> tuple[str, str]:
    """Compare with the dense model that has zeros where the compressed one ends."""
    if subject.compressed.num_parameters() == subject.dense.num_parameters():
        return "skipped", "no rank of the model that was tried is below its full one: give a larger sparsity"
    widened = densify(subject.architecture, subject.dims, subject.compressed, subject.dense)
    expected = logits(widened, subject.ids)
    if distance(expected, logits(subject.dense, subject.ids)) <= subject.allowed(expected):
        return "failed", "what was removed does not tell: the family's description is wrong"
    return verdict(
        distance(logits(subject.compressed, subject.ids), expected),
        subject.allowed(expected),
        "it computes what the dense model does with the removed coordinates set to zero",
        "it does not compute what the dense model does with the removed coordinates set to zero",
    )


def _silence(module: nn.Module, adds: bool = False) -> RemovableHandle:
    """Let a module add nothing until the hook is removed; one that `adds` puts out a sum with its second argument."""

    def silent(_module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (inputs[1] if adds else torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    return module.register_forward_hook(silent)


def _typical(subject: Subject) -> nn.Module:
    """Return the first dense block whose MLP has a rank."""
    architecture = subject.architecture
    blocks = decoder_layers(subject.dense, architecture.describe())
    typical = next((block for block in blocks if architecture.cuts_mlp(block)), None)
    if typical is None:
        raise ValueError(f"no block has '{architecture.experts or architecture.down}': see down, experts")
    return typical


@torch.no_grad()
def order(subject: Subject) -> tuple[str, str]:
    """Silence attention, then the MLP, of one block, and see which of its places hear the difference."""
    architecture, block = subject.architecture, _typical(subject)
    attention = [module for module, _as_pair in architecture.mixing(block)]
    if not attention:
        return _stands_alone(subject, block)
    places = {"the MLP": block.get_submodule(architecture.experts or architecture.up[0])}
    if not architecture.parallel:
        places[f"`middle` ({architecture.middle})"] = architecture.middle_module(block)

    def heard(silent: Sequence[nn.Module] = ()) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}

        def note(name: str) -> Any:
            return lambda module, arguments: inputs.update({name: arguments[0].clone()})

        hooks = [module.register_forward_pre_hook(note(name)) for name, module in places.items()]
        adds = architecture.adds_attention
        run_hooked(subject, hooks + [_silence(module, adds and module in attention) for module in silent])
        return inputs

    plain, silenced = heard(), {"attention": heard(attention)}
    silenced["the MLP"] = heard([block.get_submodule(architecture.experts or architecture.down)])
    if architecture.whole_attention and not _all_mixing_is_named(subject):
        place = "a block's sum" if architecture.parallel else f"`middle` ({architecture.middle})"
        return "failed", f"{place} depends on more than what is named: see mixers, middle"
    for source, inputs in silenced.items():
        for name, place in inputs.items():
            expected = source == "attention" and not architecture.parallel
            if torch.equal(place, plain[name]) == expected:
                return (
                    "failed",
                    f"{name} {'does not depend' if expected else 'depends'} on {source}: see parallel, middle",
                )
    return (
        "passed",
        f"attention and MLP are {'parallel' if architecture.parallel else 'one after the other'}, as described",
    )


def _stands_alone(subject: Subject, block: nn.Module) -> tuple[str, str]:
    """See whether a block without attention, with its MLP silent, puts out what it reads."""
    if not _all_mixing_is_named(subject):
        return "failed", "a block's sum depends on more than what is named: see mixers"
    seen: list[Tensor] = []

    def note(_module: nn.Module, inputs: Any, output: Any) -> None:
        seen.extend((inputs[0].clone(), (output[0] if isinstance(output, tuple) else output).clone()))

    silent = [block.get_submodule(path) for path in subject.architecture.mlp_outputs(block)]
    hooks = [_silence(module) for module in silent]
    run_hooked(subject, [*hooks, block.register_forward_hook(note)])
    if not torch.equal(*seen):
        return "failed", "a block without attention gives more than its MLP does: see mixers, down, shared_down"
    return "passed", "an MLP is a block of its own, as described"


def _all_mixing_is_named(subject: Subject) -> bool:
    """Whether the residual stream comes to the middle of every block as it is, when all that mixes tokens is silent.

    To its end, where attention and MLP are parallel: the MLPs are silent then, too; or where there is no MLP.
    """
    architecture, seen, hooks = subject.architecture, list[Tensor](), list[RemovableHandle]()

    def note(states: Any) -> None:
        seen.append((states[0] if isinstance(states, tuple) else states).clone())

    for block in decoder_layers(subject.dense, architecture.describe()):
        for module, _as_pair in architecture.mixing(block):
            hooks.append(_silence(module, architecture.adds_attention))
        hooks.append(block.register_forward_pre_hook(lambda _module, inputs: note(inputs)))
        if architecture.parallel:
            hooks.append(_silence(block.get_submodule(architecture.experts or architecture.down)))
        if architecture.parallel or not architecture.any_mlp(block):
            hooks.append(block.register_forward_hook(lambda _module, _inputs, output: note(output)))
        else:
            middle = architecture.middle_module(block)
            hooks.append(middle.register_forward_pre_hook(lambda _module, inputs: note(inputs)))
    run_hooked(subject, hooks)
    return all(torch.equal(before, after) for before, after in zip(seen[::2], seen[1::2], strict=True))


@torch.no_grad()
def mlp_sum(subject: Subject) -> tuple[str, str]:
    """Change what the MLP of one block gives, and see whether the block's output changes by what it should."""
    architecture = subject.architecture
    if not architecture.adds_mlp:
        return "skipped", "a norm reads what the MLP puts out together with more, so that it adds nothing by itself"
    block = _typical(subject)
    down = block.get_submodule(architecture.experts or architecture.down)

    def run(change: float) -> tuple[Tensor, Tensor]:
        """Return the MLP's output, each coordinate of it changed, and the block's."""
        seen: list[Tensor] = []

        def alter(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            output = output + change * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype, device=output.device)
            seen.append(output.clone())
            return output

        def note(_module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
            arguments.update(named_arguments(type(block), inputs[1:], named))
            seen.append((output[0] if architecture.tuple_output else output).clone())

        hooks = [down.register_forward_hook(alter), block.register_forward_hook(note, with_kwargs=True)]
        if architecture.token_arguments:  # what stands behind the sum reads all of it
            middle = architecture.middle_module(block)
            hooks.append(middle.register_forward_pre_hook(lambda _module, inputs: stream.append(inputs[0].clone())))
        run_hooked(subject, hooks)
        return seen[0].view_as(seen[1]), seen[1]

    arguments, stream = dict[str, Any](), list[Tensor]()
    (output, before), (changed, after) = run(0), run(1)
    before_mlp = stream[0] if stream else torch.zeros_like(output)
    base, moved = (architecture.put_out(block, before_mlp, each, arguments) for each in (output, changed))
    expected = moved - base
    difference, allowed = distance(after - before, expected), subject.allowed(before)
    told = f"off by {difference:.1e} at most, allowed {allowed:.1e}"
    if difference <= allowed:
        return "passed", f"a block adds to the residual stream what is described of its MLP's output ({told})"
    return (
        "failed",
        f"a block adds something else of its MLP's output: see mlp_norm, mlp_factor, sum_factor, adds_mlp ({told})",
    )
