"""Which fields and columns a batch has, and what it is without the others."""

import numpy as np
import pytest

import flowrl as fl
from flowrl.core.items import Batch, check_columns, only

BATCH = Batch(
    {name: np.zeros((4, 2)) for name in ("obs['x']", "obs['y']", "reward", "other")},
    {name: np.zeros(2) for name in ("bootstrap_obs['x']", "bootstrap_obs['y']", "env", "first")},
)


def test_a_lost_column_is_named_and_a_tree_of_columns_is_one():
    check_columns(BATCH, "bootstrap_obs", "env")
    with pytest.raises(
        fl.errors.ContractError,
        match=r"needs the column carry, but the batch has lost it; change batches by batch\.with_",
    ):
        check_columns(BATCH, "env", "carry")


def test_only_the_named_fields_and_columns_stay_and_what_is_not_there_is_left_out():
    found = only(BATCH, ("reward", "obs", "priority"), ("bootstrap_obs", "carry"))
    assert list(found.data) == ["reward", "obs['x']", "obs['y']"]
    assert list(found.columns) == ["bootstrap_obs['x']", "bootstrap_obs['y']"]
    assert found["reward"] is BATCH["reward"]
