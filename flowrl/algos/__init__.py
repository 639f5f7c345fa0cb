"""Stock algorithms: functions that return a Graph."""

STOCK = (
    "ppo",
    "a2c",
    "pg",
    "impala",
    "appo",
    "dqn",
    "apex",
    "sac",
    "vdn",
    "qmix",
    "multi_ppo",
    "bc",
    "marwil",
    "iql",
    "cql",
)
"""The names of the stock graphs. Each is a function in the module of the same name."""
