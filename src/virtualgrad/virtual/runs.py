"""Encapsulation 1, the run: the ways to run an op at a site, with T in its backward pass.

* **once**, where the op has a Function of its own;
* **joined**, any other: main and shadow, as :mod:`.ops` has it, at the price of a second forward
  (compiled, of none: one of them is dead code; :mod:`.tokens`, :mod:`.images`, :mod:`.rows` and
  :mod:`.sums` are for what is simpler there);
* **in place**, ``x op= theta``: as joined, with the shadow made first; where x is itself a copy of
  a parameter, as joined with what x was, and then written into it.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from virtualgrad.operators import identity
from virtualgrad.virtual.calls import Call, Fused
from virtualgrad.virtual.images import run_by_images
from virtualgrad.virtual.ops import Join, Transforms
from virtualgrad.virtual.plans import Plans
from virtualgrad.virtual.remembered import Part
from virtualgrad.virtual.rows import run_by_rows
from virtualgrad.virtual.sums import run_by_sums
from virtualgrad.virtual.tokens import run_by_tokens
from virtualgrad.virtual.tracking import Pass, Transform


def run_once(
    call: Call, fused: Fused, plans: Plans, current: Pass, batch_dim: int
) -> tuple[Tensor, list[Part]]:
    """An op with a Function of its own: one forward; its T is looked up in backward."""
    transforms: Transforms = {}
    sigma = fused.run(transforms, call.bound["input"])
    parts: list[Part] = []
    for part, operator in plans.of(call, tuple(sigma.shape), batch_dim):
        if operator is identity and plans.operator is not identity:
            continue  # what has no transform gets the true g
        transform = Transform(operator, part, current)
        served = tuple(use.argument for use in call.uses if use.parameter in part.parameters)
        transforms.update(dict.fromkeys(served, transform))
        parts.append((part, operator, served))
    return sigma, parts


def run_joined(call: Call, plans: Plans, current: Pass, batch_dim: int) -> Tensor:
    """Run any op: g goes back through main, T(g) through the shadows."""
    if call.rule.pull_back is None:
        main = call.main()
        plan = plans.of(call, tuple(main.shape), batch_dim)
    else:  # a norm, as large as its input; it must run once if it counts its batches
        plan = plans.of(call, tuple(call.bound["input"].shape), batch_dim)
        main = None
    if is_compiling() and plans.leave_out(plan):
        return call.plain()  # the main one of before is dead code to a compiler
    main = call.main() if main is None else main
    if is_compiling():
        simpler = run_by_tokens(call, plan, main)
        simpler = run_by_images(call, plan, main) if simpler is None else simpler
        simpler = run_by_rows(call, plan, main) if simpler is None else simpler
        simpler = run_by_sums(call, plan, main) if simpler is None else simpler
        if simpler is not None:
            return simpler
    shadows = [call.shadow(part, call.args, main) for part, _ in plan]
    transforms = [Transform(operator, part, current, main) for part, operator in plan]
    sigma: Tensor = Join.apply(transforms, False, main, *shadows)
    return sigma


def run_in_place(call: Call, plans: Plans, current: Pass, batch_dim: int) -> Tensor:
    """Run ``x op= theta``: the pull-back into theta needs the old x, so take it first."""
    target: Tensor = call.args[0]
    if any([use.tensor is target for use in call.uses]):
        return _run_into_copy(call, plans, current, batch_dim)
    plan = plans.of(call, tuple(target.shape), batch_dim)
    old = (target.detach().clone(), *call.args[1:])
    shadows = [call.shadow(part, old, target) for part, _ in plan]
    compiling = is_compiling()
    main = call.main(out_of_place=compiling)
    transforms = [Transform(operator, part, current, main) for part, operator in plan]
    sigma: Tensor = Join.apply(transforms, not compiling, main, *shadows)
    if compiling:  # a compiler makes it in place again
        target.copy_(sigma)
        return target
    return sigma


def _run_into_copy(call: Call, plans: Plans, current: Pass, batch_dim: int) -> Tensor:
    """Run ``w op= x`` where w is a copy of theta: out of place, and then write sigma into w.

    T(g) goes on through what w was, which the op would have overwritten: so w is copied first.
    """
    target: Tensor = call.args[0]
    old = target.clone()
    uses = [use._replace(tensor=old) if use.tensor is target else use for use in call.uses]
    function, args = call.rule.pull_back, (old, *call.args[1:])
    sigma = run_joined(
        call._replace(function=function, args=args, uses=uses), plans, current, batch_dim
    )
    return target.copy_(sigma)
