"""Stock algorithms: functions that return a Graph."""

STOCK = (
    *("ppo", "a2c", "a3c", "pg", "impala", "appo"),
    *("dqn", "apex"),
    *("sac", "td3", "ddpg"),
    *("vdn", "qmix", "multi_ppo"),
)
"""The names of the stock graphs. Each is a function in the module of the same name."""
