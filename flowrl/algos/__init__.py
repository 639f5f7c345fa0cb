"""Stock algorithms: functions that return a Graph."""

STOCK = (
    *("ppo", "a2c", "a3c", "pg", "impala", "appo"),
    *("dqn", "rainbow", "apex", "r2d2"),
    *("sac", "td3", "ddpg"),
    *("es", "ars"),
    *("bc", "marwil", "iql", "cql"),
    *("vdn", "qmix", "multi_ppo"),
)
"""The names of the stock graphs. Each is a function in the module of the same name."""
