"""Gradients of weights beside a compiled backward pass.

`torch.compile` makes a graph of a backward pass. `move` finds the products and convolutions in it
whose result is only returned, the gradients of weights, and makes operators of them that run on a
CUDA stream of their own. `WeightGradients.join` waits for that stream before a gradient is read.

Such an operator may still read its inputs while later ones run. So Inductor must not reuse buffers,
and the inputs are kept until `join`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from negchain.fast.streams import WeightGradients, new_stream

aten = torch.ops.aten


@functools.cache
def shared(device: torch.device) -> WeightGradients:
    """The one of a device, for all its compiled encoders; it keeps what the operators read."""
    return WeightGradients(new_stream(device))


@torch.library.custom_op("negchain::product_beside", mutates_args=())
def product_beside(left: Tensor, right: Tensor) -> Tensor:
    """left @ right on the shared stream."""
    return shared(left.device).beside(lambda: left @ right, (left, right))


@product_beside.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


@torch.library.custom_op("negchain::convolution_beside", mutates_args=())
def convolution_beside(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Gradient of a convolution's weight on the shared stream, laid out as the weight."""

    def compute() -> Tensor:
        sizes = (stride, padding, dilation, False, [0] * len(stride), groups)
        found = aten.convolution_backward(grad, x, weight, None, *sizes, (False, True, False))[1]
        return torch.empty_like(weight).copy_(found) if found.stride() != weight.stride() else found

    return shared(x.device).beside(compute, (grad, x, weight))


@convolution_beside.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *sizes: Any) -> Tensor:
    return torch.empty_like(weight)


class _Pass(CustomGraphPass):
    """`move` in the form the compiler wants."""

    def __call__(self, graph: fx.Graph) -> None:
        move(graph)

    def uuid(self) -> str:
        """What the compiler's cache knows this pass by."""
        return get_hash_for_files((__file__,)).hex()


OPTIONS: dict[str, Any] = {
    "post_grad_custom_post_pass": _Pass(),
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}
"""`torch.compile`'s options that move gradients of weights to the shared stream."""


def move(graph: fx.Graph) -> int:
    """Replace products and convolutions whose result is only returned; says how many."""
    done = 0
    if not any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes):
        return 0  # a forward pass: its results are read at once
    for node in list(graph.nodes):
        if node.target is aten.mm.default and _leaves(node):
            _replace(graph, node, node, product_beside, node.args)
            done += 1
        elif node.target is aten.convolution_backward.default:
            done += _split(graph, node)
    return done


def _replace(graph: fx.Graph, node: fx.Node, before: fx.Node, operator: Any, args: Any) -> None:
    with graph.inserting_before(before):
        new = graph.call_function(operator._opoverload, args)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _split(graph: fx.Graph, node: fx.Node) -> int:
    """The weight's part of a convolution's backward pass as an operator of its own."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
    parts = {user.args[1]: user for user in node.users}
    part = parts.get(1)
    if part is None or not _leaves(part) or transposed or not wanted[1]:  # type: ignore[index]
        return 0
    given = (grad, x, weight, stride, padding, dilation, groups)
    _replace(graph, part, node, convolution_beside, given)
    if len(parts) == 1:
        graph.erase_node(node)
    else:
        node.update_arg(10, [wanted[0], False, wanted[2]])  # type: ignore[index]
    return 1


_VIEWS = (aten.permute.default, aten.view.default, aten.t.default, aten.reshape.default)


def _leaves(node: fx.Node) -> bool:
    """Whether a result is only returned, perhaps as a view: nothing inside the graph reads it."""
    return bool(node.users) and all(
        user.op == "output" or (user.target in _VIEWS and _leaves(user)) for user in node.users
    )
