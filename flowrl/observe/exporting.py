"""`export`: a policy as a file that acts in a process without flowrl, as StableHLO or ONNX."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import numpy as np
from gymnasium.vector.utils import batch_space
from jax.export import deserialize, symbolic_shape
from jax.export import export as jax_export

from flowrl.core.new_files import check_new, write_new
from flowrl.core.texts import plural
from flowrl.core.trees import field_name, fields_of
from flowrl.errors import FlowrlError, SaveError, SettingError, install
from flowrl.rl.actions import ActionPart, Head, leaves
from flowrl.rl.images import for_no_platform
from flowrl.rl.jitted_acting import jitted_act
from flowrl.rl.policies import Memory, Network, Weights
from flowrl.rl.spaces import Spaces

Array = Any
CHECKED = 1_000
"""The number of random observations on which an export is compared with the policy."""
BATCH = 100
"""How many of them it takes at once."""
TOLERANCE = 1e-5
"""The largest difference of an action, relative to it, or to half the distance of its bounds, where
one of them is above 1; and of the outputs of two choices of which either may be taken."""
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""What StableHLO is exported for."""
WIDE = 1e6
"""The distance of two bounds from which on they are taken for none, as some environments write
them."""


@dataclass(frozen=True)
class Export:
    """A file that takes the greedy actions of a policy without flowrl.

    Args:
        path: of the file.
        inputs: what it takes, by name: types and shapes such as ``float32[b, 4]``, where b is the
            number of observations. A recurrent policy also takes its carry, and `reset`, which is
            true where an episode begins.
        outputs: what it returns, by name: actions, and from a recurrent policy the next carry.
        difference: the largest difference of its actions from those of `TrainedPolicy.act` on 1,000
            random observations, relative to the action, or to half the distance of its bounds,
            where one of them is above 1.
        ties: the number of choices that differ, because the two best are equal within 1e-5.
    """

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    difference: float
    ties: int

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.path.stat().st_size:,} bytes"]
        width = max(map(len, [*self.inputs, *self.outputs]))
        for label, named in (("takes", self.inputs), ("returns", self.outputs)):
            lines += [f"  {label:<8} {name:<{width}}  {kind}" for name, kind in named.items()]
        equal = f"largest difference from policy.act {self.difference:.1g}"
        if self.ties:
            choices = plural(self.ties, "choice")
            equal += f", {self.ties:,} {choices} of two that are equal within {TOLERANCE}"
        lines.append(f"  checked  on {CHECKED:,} random observations: {equal}")
        return "\n".join(lines)


def export(net: Network, weights: Weights, path: str | Path) -> Export:
    """Write a policy into a file; `TrainedPolicy.export` says which.

    Args:
        net: the policy.
        weights: its weights.
        path: of the file.
    """
    path = Path(path)
    kinds = {".stablehlo": _stablehlo, ".onnx": _onnx}
    if path.suffix not in kinds:
        raise SettingError(
            f"a policy is exported as FILE{' or FILE'.join(kinds)}, by the suffix of the file; got "
            f"{path}"
        )
    if not path.parent.is_dir():
        raise SaveError(f"there is no directory {path.parent} for {path.name}")
    check_new(path, "name another file (-o FILE on the command line)")
    acting = Acting(net, jax.device_put(weights))
    try:
        data, call = kinds[path.suffix](acting)
    except FlowrlError:
        raise
    except Exception as error:
        raise SaveError(
            f"{net.name} can't be exported as {path.suffix}: {type(error).__name__}: {error}; the "
            "other kind of file may do"
        ) from error
    difference, ties = _compared(acting, call)
    if not difference <= TOLERANCE:
        raise SaveError(
            f"{path} is not written: its actions differ from those of policy.act by up to "
            f"{difference:.1g}, above {TOLERANCE}, on {CHECKED:,} random observations; the other "
            "kind of file may not"
        )
    write_new(path, data, "name another file (-o FILE on the command line)")
    inputs, outputs = acting.inputs(acting.args), acting.outputs(acting.result)
    return Export(path, _described(inputs), _described(outputs), difference, ties)


class Acting:
    """The greedy actions of a policy as a function of arrays, with its weights as constants.

    It takes a batch of observations as the environment gives them and returns actions as the
    environment takes them, in the nearest types that JAX has. For a recurrent policy it is
    ``(obs, carry, reset) -> (action, carry)``; `reset` is true where an episode begins.

    Args:
        net: the policy.
        weights: its weights, on a device.
    """

    def __init__(self, net: Network, weights: Weights) -> None:
        self.net = net
        self.weights = weights
        (size,) = symbolic_shape("b")
        obs = {}
        for part in net.spaces.parts:
            dtype = jax.dtypes.canonicalize_dtype(part.declared)
            obs[part.name] = jax.ShapeDtypeStruct((size, *part.shape), dtype)
        self.args: tuple[Any, ...] = (net.spaces.tree(obs),)
        """The shapes and types of the arguments."""
        if net.recurrent:
            carry = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype),
                jax.eval_shape(lambda: net.memory(weights, 1).carry),
            )
            self.args += (carry, jax.ShapeDtypeStruct((size,), bool))
        try:
            self.result = jax.eval_shape(self, *self.args)
            """The shapes and types of what is returned."""
        except Exception as error:
            raise SaveError(
                f"{net.name} can't be exported: {type(error).__name__}: {error}. While it is "
                "exported the number of observations is a symbol: a module of your own takes it "
                "from obs.shape[0], not from len(obs), and decides nothing by it in Python"
            ) from error

    def __call__(self, obs: Any, carry: Any = (), reset: Array = ()) -> Any:
        """Return the actions, and from a recurrent policy the carry after them."""
        net = self.net
        action, after = net.greedy(self.weights, net.spaces.cast(obs), Memory(carry, reset))
        taken = net.head.to_env(action)
        return (taken, after) if net.recurrent else taken

    def inputs(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return the arrays of its arguments by name."""
        return _named(("obs", "carry", "reset"), args)

    def outputs(self, result: Any) -> dict[str, Any]:
        """Return the arrays of its result by name."""
        # Names of inputs and outputs differ, for ONNX takes equal ones for one array.
        return _named(("action", "next_carry"), result if self.net.recurrent else (result,))


def _named(roots: Sequence[str], trees: Sequence[Any]) -> dict[str, Any]:
    """Return the arrays of several trees by name."""
    found: dict[str, Any] = {}
    # A policy that is not recurrent has fewer of them.
    for root, tree in zip(roots, trees, strict=False):
        found |= fields_of(root, tree)
    return found


def _described(shapes: Mapping[str, Any]) -> dict[str, str]:
    """Return types and shapes as texts such as ``float32[b, 4]``."""
    return {
        name: f"{np.dtype(x.dtype)}[{', '.join(map(str, x.shape))}]" for name, x in shapes.items()
    }


Call = Callable[..., Any]
"""A loaded export, called as `Acting` is, on NumPy arrays."""


def _stablehlo(acting: Acting) -> tuple[bytes, Call]:
    """Return a policy as serialized StableHLO, and that loaded again."""
    data = jax_export(jax.jit(acting), platforms=PLATFORMS)(*acting.args).serialize()
    return bytes(data), deserialize(data).call


def _onnx(acting: Acting) -> tuple[bytes, Call]:
    """Return a policy as a serialized ONNX model, and that loaded again.

    Raises:
        SettingError: a package is missing.
    """
    try:
        import jax2onnx
        import onnxruntime
    except ImportError as error:
        raise SettingError(f"ONNX needs the package {error.name}: {install('onnx')}") from error
    inputs, outputs = acting.inputs(acting.args), acting.outputs(acting.result)
    structure = jax.tree.structure(acting.args)

    def flat(*arrays: Array) -> tuple[Array, ...]:
        result = acting(*jax.tree.unflatten(structure, arrays))
        return tuple(acting.outputs(result).values())

    # It logs what it leaves out, such as its own plugins for other libraries.
    for name in ("jax2onnx", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with for_no_platform(), warnings.catch_warnings():
        # Its own code rounds numbers to types that JAX then warns of.
        warnings.simplefilter("ignore")
        model = jax2onnx.to_onnx(
            flat,
            list(inputs.values()),
            model_name=acting.net.name,
            input_names=list(inputs),
            output_names=list(outputs),
        )
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    structure_of_result = jax.tree.structure(acting.result)

    def call(*args: Any) -> Any:
        given = acting.inputs(args)
        typed = {name: np.asarray(given[name], x.dtype) for name, x in inputs.items()}
        return jax.tree.unflatten(structure_of_result, session.run(None, typed))

    return data, call


# -- the comparison with the policy


def _compared(acting: Acting, call: Call) -> tuple[float, int]:
    """Return the largest difference of a loaded export's actions, and the number of ties.

    The batches of a recurrent policy follow each other, with episodes that begin in some places.

    Raises:
        SaveError: see `_difference`.
    """
    net, weights = acting.net, acting.weights
    rng = np.random.default_rng(0)
    arrays = random_observations(net.spaces, CHECKED)
    memory = net.memory(weights, BATCH)
    carry = jax.tree.map(np.asarray, memory.carry)
    distribution = jax.jit(lambda *args: net.apply(*args)[0])
    worst, ties = 0.0, 0
    for first in range(0, CHECKED, BATCH):
        seen = {name: x[first : first + BATCH] for name, x in arrays.items()}
        obs = net.spaces.tree(seen)
        batch = net.spaces.tree(net.spaces.arrays(obs))
        packed, after = jitted_act(net)(weights, batch, None, memory)
        wanted = net.head.to_env(net.unpack(np.asarray(packed))[0])
        if net.recurrent:
            got, carry = call(obs, carry, np.asarray(memory.reset))
        else:
            got = call(obs)
        dist = distribution(weights, batch, memory)
        difference, count = _difference(net.head, dist, wanted, got)
        worst, ties = max(worst, difference), ties + count
        if net.recurrent:
            memory = Memory(after, rng.random(BATCH) < 0.2)
    return worst, ties


def random_observations(spaces: Spaces, count: int) -> dict[str, Array]:
    """Return observations ``[count, ...]`` of a space by name, in the types of the environment.

    Numbers without bounds, or with bounds so wide that they mean none, are normal ones with a
    standard deviation of 10.
    """
    rng = np.random.default_rng(0)
    arrays = {}
    for part, (_, space) in zip(spaces.parts, leaves(spaces.obs), strict=True):
        several = batch_space(space, count)
        several.seed(int(rng.integers(2**31)))
        x = np.asarray(several.sample(), part.declared)
        if isinstance(space, gym.spaces.Box) and part.declared.kind == "f":
            wide = space.high.astype(np.float64) - space.low.astype(np.float64) > WIDE
            normal = np.clip(rng.normal(scale=10, size=x.shape), space.low, space.high)
            x = np.where(wide, normal, x).astype(part.declared)
        arrays[part.name] = x
    return arrays


def _ties(head: Head, dist: Any, part: ActionPart, taken: Array) -> Array:
    """Return where choices of a part of actions are as good as the best, ``bool[B, numbers]``.

    Args:
        head: of the policy.
        dist: its distribution.
        part: the part of actions.
        taken: the choices as the environment takes them, ``[B, numbers]``.
    """
    logits = np.asarray(dist.choices.logits if head.reals else dist.logits)
    begins = np.cumsum((0, *head.sizes))
    ties = []
    for number, column in enumerate(taken.astype(np.int64).T, part.first):
        own = logits[:, begins[number] : begins[number + 1]]
        choice = column - head.start[number]
        best, exists = own.max(-1), (choice >= 0) & (choice < own.shape[1])
        its = own[np.arange(len(own)), np.where(exists, choice, 0)]
        ties.append(exists & (best - its <= TOLERANCE * np.maximum(1, abs(best))))
    return np.stack(ties, axis=-1)


def _scale(head: Head, part: ActionPart, x: Array) -> Array:
    """Return what differences of real numbers of an action are measured by, ``[B, ...]``.

    An action is stretched over its bounds, so that its rounding is as large as they are wide.

    Args:
        head: of the policy.
        part: the part of actions.
        x: the actions, ``[B, *part.shape]``.
    """
    numbers = slice(part.first, part.first + math.prod(part.shape))
    half = np.asarray(head.high[numbers]) / 2 - np.asarray(head.low[numbers]) / 2
    widths = np.where(np.isfinite(half), half, 0).reshape(part.shape)
    return np.maximum(np.maximum(1, widths), abs(x))


def _difference(head: Head, dist: Any, wanted: Any, got: Any) -> tuple[float, int]:
    """Return the largest difference of real numbers, and how many choices differ that are ties.

    Raises:
        SaveError: a choice is taken that is not as good as the best, or an array has another shape
            or type.
    """
    wanted, got = fields_of("action", wanted), fields_of("action", got)
    worst, count = 0.0, 0
    for part in head.parts:
        name = field_name("action", part.path)
        x, y = wanted[name], np.asarray(got[name])
        declared = jax.dtypes.canonicalize_dtype(x.dtype)
        if (x.shape, declared) != (y.shape, y.dtype):
            raise SaveError(
                f"what was exported returns {name} as {y.dtype}{list(y.shape)}, but policy.act as "
                f"{declared}{list(x.shape)}"
            )
        if part.discrete:
            differ = (x != y).reshape(len(x), -1)
            if (differ & ~_ties(head, dist, part, y.reshape(differ.shape))).any():
                raise SaveError(
                    f"what was exported takes another {name} than policy.act, whose output is not "
                    f"within {TOLERANCE} of the best; it is not written"
                )
            count += int(differ.sum())
        else:
            distance = abs(x.astype(np.float64) - y) / _scale(head, part, x)
            # A number that is NaN is a difference, too.
            worst = max(worst, float(np.nan_to_num(distance, nan=np.inf).max(initial=0)))
    return worst, count
