"""`Optimizers`: an optimiser for each group of parameters, at rates of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import optax

from flowrl.core.arguments import Composed
from flowrl.errors import PolicyError, SettingError, a
from flowrl.graph.values import Spec
from flowrl.rl.optimizers import Optax, Optimizer

Array = Any
Params = dict[str, Array]


class GroupsState(NamedTuple):
    """State of the optimisers of all groups."""

    count: Array
    """int32: the gradient steps so far."""
    groups: dict[str, Any]
    """The state of each group's optimiser."""


class Optimizers(Spec, Composed):
    """An optimiser for each group of a policy's parameters, which may step less often than others.

    ``Optimizers(actor=Adam(1e-4), critic=Adam(1e-3), every={"actor": 2})`` steps the actor at every
    second gradient step. What is not due computes no gradient.

    A name is that of a group which the policy's module declares in ``parameter_groups``, such as
    those of `SACNetwork` and `TD3Network`, or what the paths of its parameters begin with, such as
    ``actor`` for ``actor/layers/0/kernel``. Every parameter must be in exactly one group. A
    schedule counts the gradient steps of its own group.

    Args:
        every: gradient steps for each step of a group, by its name; those that it does not name
            step every time (default: all of them).
        **groups: the optimiser of each group, such as `Adam`, by its name.

    Raises:
        SettingError: there is no group, one has no optimiser, or `every` names another one or a
            number below 1.
    """

    def __init__(self, *, every: Mapping[str, int] | None = None, **groups: Any) -> None:
        super().__init__(Optimizers, **groups, **({"every": dict(every)} if every else {}))
        self._check()

    @classmethod
    def made(cls, fn: Any, settings: dict[str, Any]) -> Self:  # noqa: ARG003 - always itself
        """Return a value of this class with other settings."""
        return cls(**settings)

    def parts(self) -> tuple[Any, list[tuple[str | None, Any]]]:
        """Return the class, and the settings as its arguments."""
        return type(self), [*self.settings.items()]

    def composed(self, settings: Mapping[str, Any]) -> Self:
        """Return the same with other settings, which are not checked."""
        made = object.__new__(type(self))
        made.__dict__.update(fn=self.fn, settings=settings)
        return made

    def _check(self) -> None:
        """Raise an error unless each group has an optimiser, and a period of at least 1."""
        if not self.groups:
            raise SettingError(
                "Optimizers takes an optimiser for each group of parameters, such as "
                "actor=fl.Adam(1e-4), critic=fl.Adam(1e-3)"
            )
        for name, optimizer in self.groups.items():
            if not isinstance(optimizer, Optimizer | Optax):
                raise SettingError(
                    f"Optimizers: {name} must be an optimiser such as fl.Adam(3e-4), "
                    f"got {a(optimizer)}"
                )
        for name, steps in self.every.items():
            if name not in self.groups:
                raise SettingError(
                    f"Optimizers: every names {name}, but the groups are {', '.join(self.groups)}"
                )
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise SettingError(
                    f"Optimizers: every takes gradient steps of at least 1, got {name}: {steps!r}"
                )

    @property
    def groups(self) -> dict[str, Any]:
        """The optimiser of each group."""
        return {name: value for name, value in self.settings.items() if name != "every"}

    @property
    def every(self) -> Mapping[str, int]:
        """Gradient steps for each step of the groups that do not step every time."""
        return cast("Mapping[str, int]", self.settings.get("every", {}))

    def members(
        self, names: Collection[str], declared: Mapping[str, tuple[str, ...]]
    ) -> dict[str, list[str]]:
        """Return the parameters of each group.

        Args:
            names: of all parameters, such as ``actor/layers/0/kernel``.
            declared: what the names of a group's parameters begin with, by group.

        Raises:
            PolicyError: a parameter is in no group or in several, or a group is empty.
        """
        prefixes = {group: declared.get(group, (group,)) for group in self.groups}
        of: dict[str, list[str]] = {group: [] for group in prefixes}
        for name in names:
            found = [group for group, starts in prefixes.items() if _begins(name, starts)]
            if len(found) != 1:
                which = f"the groups {' and '.join(found)}" if found else "no group"
                ways = f"the policy declares {', '.join(declared)}" if declared else _firsts(names)
                raise PolicyError(
                    f"Optimizers: the parameter {name} is in {which} of "
                    f"{', '.join(self.groups)}; {ways}"
                )
            of[found[0]].append(name)
        if empty := [group for group, mine in of.items() if not mine]:
            raise PolicyError(
                f"Optimizers: no parameter is in the group {empty[0]}; {_firsts(names)}"
            )
        return of

    def build(self, members: Mapping[str, list[str]]) -> optax.GradientTransformation:
        """Return one transformation, which updates the parameters of the groups that are due.

        Args:
            members: the names of each group's parameters.
        """
        rules = {group: optimizer.build() for group, optimizer in self.groups.items()}

        def init(params: Params) -> GroupsState:
            states = {g: rule.init(_of(members[g], params)) for g, rule in rules.items()}
            return GroupsState(jnp.int32(0), states)

        def update(
            gradients: Params, state: GroupsState, params: Any = None
        ) -> tuple[Params, GroupsState]:
            updates, states = {}, {}
            for group, rule in rules.items():
                mine = (_of(members[group], gradients), state.groups[group])
                step = _stepping(rule, _of(members[group], params))
                if group in self.every:
                    due = self.due(group, state)
                    changes, states[group] = jax.lax.cond(due, step, _resting, *mine)
                else:
                    changes, states[group] = step(*mine)
                updates.update(changes)
            return updates, GroupsState(state.count + 1, states)

        return optax.GradientTransformation(init, update)

    def due(self, group: str, state: GroupsState) -> Array:
        """Return whether a group takes the next gradient step: the last one of its period."""
        return (state.count + 1) % self.every.get(group, 1) == 0

    @property
    def keeps_finite(self) -> bool:
        """Whether each of the optimisers keeps numbers finite, as `Optimizer.keeps_finite` says."""
        return all(isinstance(x, Optimizer) and x.keeps_finite for x in self.groups.values())

    @property
    def delays(self) -> bool:
        """Whether a group rests at times."""
        return any(steps > 1 for steps in self.every.values())

    def gradients(
        self,
        loss: Callable[[Params, frozenset[str]], Any],
        params: Params,
        state: GroupsState,
        members: Mapping[str, list[str]],
    ) -> Any:
        """Return ``((loss, aux), gradients)``, where the gradients of what is not due are 0.

        Args:
            loss: returns ``(loss, aux)`` of the parameters and of the names of the groups that
                rest.
            params: the parameters by name.
            state: of the optimisers.
            members: the parameters of each group.
        """
        delayed = [group for group in self.groups if self.every.get(group, 1) > 1]

        def of_due(resting: frozenset[str]) -> Callable[[Params], Any]:
            """Return the gradients of all groups but some, as a function of the parameters."""
            fixed = [name for group in resting for name in members[group]]

            def compute(params: Params) -> Any:
                held = _of(fixed, params)
                moving = {name: x for name, x in params.items() if name not in held}

                def of_moving(moving: Params) -> Any:
                    # The order of the names is that of the whole, as the network takes them.
                    both = {**held, **moving}
                    return loss({name: both[name] for name in params}, resting)

                value, gradients = jax.value_and_grad(of_moving, has_aux=True)(moving)
                zeros = {name: jnp.zeros_like(x) for name, x in held.items()}
                return value, {name: {**zeros, **gradients}[name] for name in params}

            return compute

        # One branch for each set of groups that may rest at a time.
        branches, index = [frozenset[str]()], jnp.int32(0)
        for group in delayed:
            index += len(branches) * jnp.int32(~self.due(group, state))
            branches += [resting | {group} for resting in branches]
        return jax.lax.switch(index, [of_due(resting) for resting in branches], params)


def _of(names: Collection[str], arrays: Params) -> Params:
    """Return the arrays of these names."""
    return {name: arrays[name] for name in names}


def _stepping(rule: optax.GradientTransformation, params: Params) -> Callable[..., Any]:
    """Return the update of a group that is due, from gradients and state to updates and state."""
    return lambda gradients, state: rule.update(gradients, state, params)


def _resting(gradients: Params, state: Any) -> tuple[Params, Any]:
    """Return no updates, and the state as it is."""
    return jax.tree.map(jnp.zeros_like, gradients), state


def _begins(name: str, starts: tuple[str, ...]) -> bool:
    """Return whether the path of a parameter begins with one of these, each of whole parts."""
    return f"{name}/".startswith(tuple(f"{start.rstrip('/')}/" for start in starts))


def _firsts(names: Collection[str]) -> str:
    """Return what the names of parameters begin with, as text."""
    firsts = dict.fromkeys(name.partition("/")[0] for name in names)
    return f"their names begin with {', '.join(firsts)}"
