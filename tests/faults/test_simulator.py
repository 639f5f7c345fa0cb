"""Whatever happens to runners and shards, the scheduler keeps its promises; `make faults` has more.

Faults are planted in the scheduler, so that it is known that they would be found.
"""

import pytest
from planted_faults import FAULTS
from run_schedules import case_of, run_schedules, table
from simulated_graphs import cases
from simulator import KINDS, Simulation

SCHEDULES = 60


@pytest.mark.system
@pytest.mark.parametrize("graph", ["ppo", "impala", "apex"])
def test_no_schedule_breaks_an_invariant(graph):
    found = run_schedules(graph, range(SCHEDULES))
    assert not found.violations, "".join(found.violations[:1])
    assert found.schedules == SCHEDULES and found.updates >= 2 * SCHEDULES
    assert all(found.faults[kind] for kind in KINDS), table([found])


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    fault = FAULTS[name]
    # What is compiled and planned beforehand is as it should be.
    for case in cases()[fault.graph]:
        case.plan  # noqa: B018 - it is made once
    with fault.planted():
        for seed in range(SCHEDULES):
            sim = Simulation(case_of(fault.graph, seed), seed)
            sim.run()
            if sim.violations:
                return
    pytest.fail(f"{SCHEDULES} schedules of {fault.graph} do not find it")
